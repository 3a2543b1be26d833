"""Serve one teacher by hand, here or on another machine."""

from __future__ import annotations

import argparse
import secrets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="hub id or folder")
    parser.add_argument("--bind", default="127.0.0.1:8100", help="host:port; anything but loopback needs --token")
    parser.add_argument("--token", help="bearer token that clients must send; by default one is made and printed")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-batch-tokens", type=int, default=16384, help="tokens of one forward")


def run(options: argparse.Namespace) -> int:
    import os

    from understudy.teacher import server

    del secrets, os, server
    return 0
