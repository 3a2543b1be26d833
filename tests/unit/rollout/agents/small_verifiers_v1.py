"""A taskset of two tasks written with `verifiers.v1`."""

from collections.abc import Iterator

import verifiers.v1 as vf


class Product(vf.TaskData):
    answer: str = ""


class ProductTask(vf.Task[Product]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class ProductTaskset(vf.Taskset[ProductTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ProductTask]:
        for number in (12, 2):
            data = Product(prompt=f"What is {number} * 3?", answer=str(number * 3))
            yield ProductTask(data, self.config.task)


__all__ = ["ProductTaskset"]
