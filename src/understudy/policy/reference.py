"""The frozen reference model: log-probabilities of the written tokens, without gradients."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from understudy.errors import PolicyError
from understudy.media.processor import PictureReader
from understudy.policy.assemble import Assembler
from understudy.policy.forward.forward import StudentForward, attention_for, choose_layout, sampled_logprobs
from understudy.policy.forward.head import verify_head
from understudy.policy.load import switch_off_dropout, switch_off_router_noise
from understudy.policy.plan import border_of, by_length, lanes_of, plan_step
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.usable_ids import UsableIds


class ReferenceModel:
    """A frozen model. Micro-batches are composed as the student's are, so equal weights give bit-equal
    results."""

    def __init__(
        self,
        model: PreTrainedModel,
        lanes: int = 1,
        usable: UsableIds | None = None,
        pictures: PictureReader | None = None,
    ) -> None:
        switch_off_dropout(model)
        switch_off_router_noise(model)
        verify_head(model)
        model.requires_grad_(False)
        model.train()
        self.model = model
        self.layout = choose_layout(model)
        self.forward = StudentForward(model, usable=usable, pictures=pictures)
        self.rotary_border = border_of(model)
        self.lanes = lanes_of(lanes, self.rotary_border)

    @torch.no_grad()
    def logprobs(
        self, batch: Batch, max_tokens_per_microbatch: int = 8192, temperature: float = 1.0
    ) -> Jagged:
        """float32 [P] per row."""
        assembler = Assembler(batch, [torch.zeros(int(mask.sum())) for mask in batch.loss_mask]).hold()
        found = torch.zeros(int(assembler.loss_offsets[-1]))
        rows = assembler.rows_with_loss()
        if not rows:
            return Jagged(found, assembler.loss_offsets)
        vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        if int(batch.tokens.values.max()) >= vocabulary:
            raise PolicyError(
                f"token id {int(batch.tokens.values.max())} is beyond the reference's vocabulary of {vocabulary}; reference "
                "and student must share one token → id map"
            )
        lengths = assembler.token_lengths.tolist()
        plan = plan_step(
            rows,
            lengths,
            batch.keys,
            by_length(assembler.groups(), lengths, self.rotary_border),
            max_tokens_per_microbatch,
            self.layout,
            lanes=self.lanes.count,
        )
        device = next(self.model.parameters()).device

        @torch.no_grad()
        def read(group: list[int]) -> None:
            micro = assembler.cut(group, self.layout).to(device)
            _, values = self.forward(micro, sampled_logprobs, temperature=temperature)
            found[assembler.loss_places(group)] = values.float().cpu()

        with attention_for(self.model, self.layout):
            self.lanes.run(read, plan.mine)
        return Jagged(found, assembler.loss_offsets)
