"""Where the student's update spends its GPU time, and what some changes to it save.

    python benchmarks/one_gpu/update_profile.py             about 110 s on an H200
    python benchmarks/one_gpu/update_profile.py --cpu       tiny shapes, to try the script

The update is `Policy.update` at step.py's shape: a 0.6B student of random weights, 256 rows of 640 tokens, 512 of them
trained, forward KL over the teacher's best 64. Of the default, one update's Python frames are sampled (`host`): how busy each
thread was, and where. Another is profiled (torch.profiler, unless --no-profile); GPU seconds are summed by class of kernel,
`idle` is what no kernel covers. Then each variant is timed beside the default.

Results go to update-<hardware>-<date>.json; the profile's classes and largest kernels to update_profile.json and
update_profile.txt beside it, the frames to update_host.txt.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import config as inductor
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name, gpu_name
from step import MODELS, TINY, VOCAB
from step_problem import Row, save, show
from understudy.losses.objective import Objective
from understudy.nn.determinism import keep_to_repeatable
from understudy.policy import microbatch
from understudy.policy.assemble import Assembler, MicroBatch
from understudy.policy.forward import packed
from understudy.policy.microbatch import Layout
from understudy.policy.policy import Policy
from understudy.policy.step import PolicySettings
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged

GOAL_S = 1.2
PROMPT = 128
CLASSES: tuple[tuple[str, str], ...] = (
    ("norms, rotary, gates, sums (compiled)", r"^triton_(poi|red|per)"),
    ("attention backward", r"(flash|fmha|cudnn|sdpa|attention).*(bwd|bprop|backward)|dot_do_o|convert_dq"),
    ("attention forward", r"flash|fmha|sdpa|attention"),
    ("products", r"gemm|cutlass|cublas|nvjet|splitk|sm90_xmma|matmul|^triton_tem"),
    ("optimizer", r"adam|multi_tensor|foreach|lpnorm|l2norm"),
    (
        "loss besides its products",
        r"candidate|exponentiate_rows|full_(summary|gradient)|scale_(rows|unless)|_hide",
    ),
    ("copies", r"memcpy|memset|copy_kernel|direct_copy|catarray|fillfunctor"),
    ("other elementwise, embedding", r"elementwise|reduce|index|embedding|sort|scan|radix"),
)
"""The first pattern that a kernel's name matches, without case, decides its class."""


@dataclass(frozen=True, slots=True)
class Work:
    """The sizes of an update."""

    rows: int
    prompt: int
    new: int
    topk: int
    vocab: int
    size: dict[str, int]
    heads: tuple[int, int, int]
    micro: int
    device: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Variant:
    """A change to the default update. `around` is entered before the policy is built."""

    name: str
    micro: float = 1.0
    """Tokens of a micro-batch, relative to the default."""
    around: Callable[[], Any] | None = None


WHOLE = Work(256, PROMPT, 512, 64, VOCAB, MODELS["student"], (16, 8, 128), 32_768, "cuda", torch.bfloat16)
SMALL = Work(4, 16, 16, 8, 512, TINY["student"], (4, 2, 16), 64, "cpu", torch.float32)


def main() -> None:
    options = _options()
    work = SMALL if options.cpu else WHOLE
    if not options.cpu and not torch.cuda.is_available():
        sys.exit("no CUDA device; --cpu tries the script with tiny shapes")
    started, hardware = time.monotonic(), cpu_name() if options.cpu else gpu_name()
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{hardware}, torch {torch.__version__}", flush=True)
    batch, weights = _batch(work)
    name, rows = f"{work.rows} x {work.new}", []
    default = 0.0
    for variant in [one for one in variants(options.cpu) if not options.only or one.name in options.only]:
        left = options.budget - (time.monotonic() - started)
        if left < options.least:
            print(f"{variant.name}: no time left ({left:.0f} s)", flush=True)
            continue
        try:
            with (variant.around or _unchanged)():
                seconds, parts, peak = _timed(work, variant, batch, weights, options)
        except Exception as error:  # a variant that fails is reported, and the next one is tried
            print(f"{variant.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        finally:
            _free()
        row = Row(f"{name}: update, {variant.name}", round(seconds, 4), "s")
        if variant.name == "default":
            default = seconds
            row.goal, row.met = f"<= {GOAL_S} s", seconds <= GOAL_S
        elif default:
            row.peer, row.peer_value = "default, same run", round(default, 4)
            row.ratio = round(seconds / default, 3)
        rows += [
            row,
            *(Row(f"{row.name}, {part}", round(value, 4), "s of an update") for part, value in parts.items()),
        ]
        rows.append(Row(f"{row.name}, peak memory", round(peak / 2**30, 2), "GiB"))
        print(*map(show, rows[-2 - len(parts) :]), sep="\n", flush=True)
        print(f"  after {time.monotonic() - started:.0f} s", flush=True)
        save("update", hardware, rows, options.out)


def variants(cpu: bool) -> list[Variant]:
    """The default first; it is also the one that is profiled."""
    found = [
        Variant("default"),
        Variant("default once more, compiled code from the cache"),
        # 51 rows fit 32,768 tokens: five micro-batches, a sixth of one row, and attention in groups of 48 and 3.
        Variant("full micro-batches and a rest", around=_rest),
        Variant("48 rows a micro-batch and a rest, one attention group", micro=48 / 51.2, around=_rest),
        Variant("micro-batches cut between passes", around=_cut_in_turn),
        Variant("micro-batches of twice the tokens", micro=2.0),
        Variant("fixed shapes", around=_fixed_shapes),
        Variant("FlashAttention instead of cuDNN", around=_flash_only),
        Variant("deterministic algorithms", around=_deterministic),
        Variant("kernels tuned by coordinate descent", around=_tuned),
    ]
    return [one for one in found if not cpu or one.around not in (_tuned, _fixed_shapes)]


def _timed(
    work: Work, variant: Variant, batch: Batch, weights: Jagged, options: argparse.Namespace
) -> tuple[float, dict[str, float], int]:
    """(median seconds of an update, its parts, peak bytes). The first update compiles and is not counted."""
    policy = Policy(_model(work), PolicySettings(compile=work.device == "cuda"))
    objective, micro = Objective(kind="forward_kl", signal="topk"), round(work.micro * variant.micro)
    begun, found, peak = time.perf_counter(), [], 0

    def update() -> float:
        _wait(work)
        start = time.perf_counter()
        result = policy.update(batch, objective, weights, micro)
        _wait(work)
        found.append(dict(result.seconds))
        return time.perf_counter() - start

    print(f"{variant.name}: first update {update():.1f} s", flush=True)
    update()
    found.clear()
    if work.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [update() for _ in range(options.updates)]
    if work.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    print(
        f"{variant.name}: updates {', '.join(f'{one:.3f}' for one in seconds)} s, {time.perf_counter() - begun:.0f} s in all",
        flush=True,
    )
    parts = {part: median(one[part] for one in found) for part in ("prepare", "compute", "optimizer")}
    if variant.name == "default":
        _sampled(update, options.out)
        if options.profile:
            _profiled(update, options.out)
    return median(seconds), parts, peak


def _sampled(update: Callable[[], float], out: Path) -> None:
    """Writes where each thread's Python frames were during one update, and the CPU seconds of each thread."""
    frames: Counter[tuple[str, ...]] = Counter()
    ended = threading.Event()

    def sample() -> None:
        own = threading.get_ident()
        while not ended.wait(0.002):
            names = {one.ident: one.name for one in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != own:
                    frames[names.get(ident, "unnamed"), *_innermost(frame)] += 1

    sampler = threading.Thread(target=sample, name="sampler")
    before = _thread_seconds()
    sampler.start()
    wall = update()
    ended.set()
    sampler.join()
    busy = {name: round(seconds - before.get(name, 0.0), 3) for name, seconds in _thread_seconds().items()}
    lines = [f"wall seconds {wall:.3f}, {sum(frames.values())} samples"]
    lines += [
        f"thread {name:<28} {seconds:>7.3f} CPU s"
        for name, seconds in sorted(busy.items(), key=lambda item: -item[1])
        if seconds > 0.005
    ]
    lines += [f"{count:>6} x  {' < '.join(place)}" for place, count in frames.most_common(60)]
    (out / "update_host.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[:40]), flush=True)


def _innermost(frame: Any, depth: int = 4) -> Iterator[str]:
    while frame is not None and depth:
        yield f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame, depth = frame.f_back, depth - 1


def _thread_seconds() -> dict[str, float]:
    """CPU seconds of this process's threads, by name and number, and of its ended children; Linux only."""
    found = {}
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        ticks = rest.split()[11:13]
        found[f"{name} {task.parent.name}"] = sum(map(int, ticks)) / 100
    return found


def _profiled(update: Callable[[], float], out: Path) -> None:
    """Writes the classes of kernels and the largest kernels of one update."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as trace:
        wall = update()
    on_gpu = torch.cuda.is_available()
    # Annotations have spans on the GPU too, over many kernels.
    events = [
        one
        for one in trace.events() or ()
        if not on_gpu or (str(one.device_type).endswith("CUDA") and not one.is_user_annotation)
    ]
    spans = [
        (one.time_range.start, one.time_range.end, one.name)
        for one in events
        if one.time_range.end > one.time_range.start
    ]
    totals: dict[str, list[float]] = {}
    kernels: dict[str, list[float]] = {}
    for start, end, name in spans:
        for table, key in ((totals, kind_of(name)), (kernels, name)):
            entry = table.setdefault(key, [0.0, 0])
            entry[0] += (end - start) / 1e6
            entry[1] += 1
    first, last = min(one[0] for one in spans), max(one[1] for one in spans)
    covered = _covered(spans)
    shown = {
        key: {"seconds": round(value[0], 4), "kernels": value[1]}
        for key, value in sorted(totals.items(), key=lambda item: -item[1][0])
    }
    largest: list[dict[str, Any]] = [
        {"name": key[:200], "class": kind_of(key), "seconds": round(value[0], 5), "count": value[1]}
        for key, value in sorted(kernels.items(), key=lambda item: -item[1][0])[:40]
    ]
    found = {
        "wall seconds": round(wall, 4),
        "from the first kernel to the last": round((last - first) / 1e6, 4),
        "covered by kernels": round(covered / 1e6, 4),
        "idle between kernels": round((last - first - covered) / 1e6, 4),
        "classes": shown,
        "largest": largest,
    }
    (out / "update_profile.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [f"{key:<36} {value}" for key, value in found.items() if isinstance(value, float)]
    lines += [
        f"{key:<36} {value['seconds']:>9.4f} s {value['kernels']:>7.0f} kernels"
        for key, value in shown.items()
    ]
    lines += [
        f"{one['seconds']:>9.5f} s {one['count']:>6.0f} x  {one['class']:<28} {one['name'][:150]}"
        for one in largest
    ]
    (out / "update_profile.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, pattern in CLASSES if re.search(pattern, lower)), "other")


def _covered(spans: Sequence[tuple[float, float, str]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _model(work: Work) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    heads, key_heads, size = work.heads
    config = Qwen3Config(
        vocab_size=work.vocab,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=size,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **work.size,
    )
    with torch.device(work.device):
        return Qwen3ForCausalLM(config).to(work.dtype)


def _batch(work: Work) -> tuple[Batch, Jagged]:
    """Random tokens with a teacher's best candidates, and the reduction weights of a mean over tokens."""
    generator = torch.Generator().manual_seed(0)
    length, trained = work.prompt + work.new, work.rows * work.new
    tokens = torch.randint(0, work.vocab, (work.rows, length), generator=generator)
    mask = torch.zeros(work.rows, length, dtype=torch.bool)
    mask[:, work.prompt :] = True
    first = torch.randint(0, work.vocab - work.topk, (trained, 1), generator=generator)
    logprobs = torch.randn(trained, work.topk, generator=generator).log_softmax(-1) - 0.05
    ends = torch.arange(work.rows + 1)

    def jagged(values: torch.Tensor, each: int) -> Jagged:
        return Jagged(values, ends * each)

    batch = Batch(
        keys=tuple(f"row-{index:04d}" for index in range(work.rows)),
        tokens=jagged(tokens.flatten(), length),
        loss_mask=jagged(mask.flatten(), length),
        behaviour_logprobs=jagged(torch.where(mask, -1.0, float("nan")).flatten(), length),
        teachers=("teacher",) * work.rows,
        teacher_logprobs=jagged(logprobs[:, 0].clone(), work.new),
        teacher_ids=jagged(first + torch.arange(work.topk), work.new),
        teacher_topk_logprobs=jagged(logprobs.sort(-1, descending=True).values, work.new),
    )
    return batch, jagged(torch.full((trained,), 1.0 / trained), work.new)


def _wait(work: Work) -> None:
    if work.device == "cuda":
        torch.cuda.synchronize()


def _free() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


@contextmanager
def _fixed_shapes() -> Iterator[None]:
    """Layers compiled for one length each: what `dynamic=True` costs."""
    plain = torch.nn.Module.compile

    def fixed(module: torch.nn.Module, *words: Any, **options: Any) -> None:
        plain(module, *words, **{**options, "dynamic": False})

    with patch.object(torch.nn.Module, "compile", fixed):
        yield


@contextmanager
def _flash_only() -> Iterator[None]:
    with patch.object(packed, "takes_groups", lambda *words, **options: False):
        yield


@contextmanager
def _rest() -> Iterator[None]:
    """Micro-batches as full as they may be, and one of the rows that are left."""
    with patch.object(microbatch, "balanced", lambda rows, lengths, parts: [list(rows)]):  # never fits
        yield


@contextmanager
def _cut_in_turn() -> Iterator[None]:
    """Micro-batches are cut and copied between passes, not on a thread beside them."""

    def in_turn(
        self: Assembler, passes: Iterable[tuple[Sequence[int], bool]], layout: Layout, device: torch.device
    ) -> Iterator[tuple[MicroBatch, bool]]:
        for rows, counted in passes:
            yield self.cut(rows, layout, dummy=not counted).to(device), counted

    with patch.object(Assembler, "cut_ahead", in_turn):
        yield


@contextmanager
def _tuned() -> Iterator[None]:
    with inductor.patch(coordinate_descent_tuning=True):
        yield


@contextmanager
def _deterministic() -> Iterator[None]:
    keep_to_repeatable(True, "cuda" if torch.cuda.is_available() else "cpu")
    try:
        yield
    finally:
        keep_to_repeatable(False, "cuda" if torch.cuda.is_available() else "cpu")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="tiny shapes without a GPU, to try the script")
    parser.add_argument("--updates", type=int, default=3, help="counted updates of each variant")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="no trace of kernels")
    parser.add_argument("--only", nargs="+", help="names of variants")
    parser.add_argument("--budget", type=float, default=170.0, help="seconds for everything")
    parser.add_argument("--least", type=float, default=12.0, help="no variant begins with fewer seconds left")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
