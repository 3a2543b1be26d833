"""On-policy distillation in one file, without the framework: the reference of the sync trainer.

    python examples/minimal_opd.py --student DIR --teacher add=DIR --teacher sort=DIR --data train.jsonl --steps 5

Each step: the student answers a batch of prompts; each answer is scored by the teacher that its
`data_source` names; the student takes one AdamW step on forward KL over the teacher's top-k ids plus one
tail bucket. A golden test runs the framework on the same recipe and finds the same losses, step by step.

Shapes: B rows, L longest row, T new tokens, V vocabulary, K candidates, N loss-bearing tokens.
"""

import argparse
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def seed_of(*parts: str | int) -> int:
    """Each rollout's own seed, a hash of what the rollout is for, so it does not depend on the order of
    work."""
    digest = hashlib.blake2b(digest_size=8)
    for part in ("generate", *parts):
        data = str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1


@torch.inference_mode()
def rollout(model, prompts: list[list[int]], seeds: list[int], max_new: int, eos: int) -> list[list[int]]:
    """Sample each continuation at temperature 1 by inverse CDF; no cache, no padding: one prompt at a time."""
    answers = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        draws, tokens = np.random.default_rng(seed).random(max_new), list(prompt)
        for u in draws:
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].float()
            cdf = logits.softmax(-1).double().cumsum(-1)
            token = int(torch.searchsorted(cdf, u * cdf[-1], right=True).clamp(max=len(cdf) - 1))
            tokens.append(token)
            if token == eos:
                break
        answers.append(tokens[len(prompt) :])
    return answers


def predictions(model, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """log-probabilities [T, V] that predict each token of the answer: the logits at t − 1 predict token t."""
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].float()
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def forward_kl(student_TV: torch.Tensor, teacher_TV: torch.Tensor, k: int) -> torch.Tensor:
    """KL(teacher ‖ student) per token, over the teacher's k best ids and one bucket for all the rest."""
    p_TK, ids_TK = teacher_TV.topk(k, -1)
    q_TK = student_TV.gather(-1, ids_TK)
    p_tail = torch.log1p(-p_TK.exp().sum(-1).clamp(max=1 - 2**-23))
    q_tail = student_TV.scatter(-1, ids_TK, -torch.inf).logsumexp(-1)
    return (p_TK.exp() * (p_TK - q_TK)).sum(-1) + p_tail.exp() * (p_tail - q_tail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--student", required=True)
    parser.add_argument("--teacher", action="append", required=True, metavar="DATA_SOURCE=DIR")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.student)
    student = AutoModelForCausalLM.from_pretrained(options.student, dtype=torch.float32).eval()
    teachers = {}
    for entry in options.teacher:
        source, folder = entry.split("=", 1)
        teachers[source] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in options.data.read_text().splitlines()]
    eos = student.generation_config.eos_token_id
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=options.learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )

    for step in range(1, options.steps + 1):
        place = (step - 1) * options.batch_size
        batch = rows[place : place + options.batch_size]
        keys = [f"{0:05d}-{place + i:07d}" for i in range(len(batch))]
        prompts = [
            tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
            for row in batch
        ]

        seeds = [seed_of(options.seed, 0, key, 0, 0) for key in keys]
        answers = rollout(student, prompts, seeds, options.max_new_tokens, eos)

        count = sum(len(answer) for answer in answers)
        loss = torch.zeros(())
        for row, prompt, answer in zip(batch, prompts, answers, strict=True):
            with torch.no_grad():
                teacher_TV = predictions(teachers[row["data_source"]], prompt, answer)
            student_TV = predictions(student, prompt, answer)
            loss = loss + forward_kl(student_TV, teacher_TV, options.topk).sum() / count

        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), options.grad_clip)
        optimizer.step()
        if not math.isfinite(float(loss.detach())):
            raise SystemExit(f"step {step}: loss is not finite")
        line = {"step": step, "loss": float(loss.detach()), "grad_norm": float(norm), "tokens": count}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
