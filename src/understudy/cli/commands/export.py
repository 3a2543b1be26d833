"""Write a run's trained student as a Hugging Face folder, and push it to the hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from understudy.errors import ConfigError
from understudy.observability.live import LiveView
from understudy.observability.rundir import RunDir, check_free

EXAMPLE = "understudy export runs/RUN my-student"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("out", type=Path, help="the folder to write; it must not exist or be empty")
    parser.add_argument("--best", action="store_true", help="the checkpoint of the best held-out accuracy")
    parser.add_argument(
        "--averaged", action="store_true", help="the running average of the weights (trainer.ema_decay)"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="the LoRA adapter alone, in peft's layout, instead of merged weights",
    )
    parser.add_argument(
        "--push",
        metavar="ORG/NAME",
        help="also upload the folder to the hub, to a private repository if it is new (HF_TOKEN, HF_ENDPOINT)",
    )
    parser.add_argument("--public", action="store_true", help="with --push: a new repository is public")


def run(options: argparse.Namespace) -> None:
    RunDir.open(options.run)  # refusals before torch is imported
    check_free(options.out)
    if options.public and options.push is None:
        raise ConfigError("--public is for --push ORG/NAME, which is not given")
    if options.push is not None:
        from understudy.run.push import check_pushable

        check_pushable(options.push)
    from transformers.utils import logging as transformers_logging

    from understudy.run.export import export_run

    transformers_logging.disable_progress_bar()  # the command has its own display
    with LiveView(0) as view, view.work(f"writing {options.out}"):
        out = export_run(
            options.run, options.out, best=options.best, averaged=options.averaged, adapter=options.adapter
        )
    loader = (
        "PeftModel.from_pretrained(base_model, "
        if options.adapter
        else "AutoModelForCausalLM.from_pretrained("
    )
    Console().print(
        f"wrote {out}; load it with {loader}{str(out)!r})",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if options.push is not None:
        from understudy.run.push import push

        with LiveView(0) as view, view.work(f"uploading to {options.push}"):
            address = push(out, options.push, public=options.public)
        Console().print(f"pushed to {address}", highlight=False, markup=False, soft_wrap=True)
