"""Builds a replica's scorer from command-line options: one process, or several in lockstep."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace

import torch

from understudy.errors import TeacherError
from understudy.media.pictures import PictureLimits
from understudy.media.processor import PictureProcessor, PictureReader
from understudy.nn.vision import is_vision
from understudy.teacher.manifest import Limits, Manifest, RequestBatching, picture_facts
from understudy.teacher.replica import lockstep
from understudy.teacher.replica.media import ReplicaMedia
from understudy.teacher.replica.scoring_queue import ScoringWorker
from understudy.teacher.replica.tensor_parallel import ReplicaRank, join
from understudy.teacher.scoring.body import ScoringLayout
from understudy.teacher.scoring.eight_bits import Bits
from understudy.teacher.scoring.model import FrozenModel, hashed_weights, load_frozen, vocabulary_of
from understudy.teacher.scoring.offload import offloaded
from understudy.teacher.scoring.quantize import quantized
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions
from understudy.teacher.scoring.warm_up import warm_up
from understudy.teacher.vocabulary import Vocabulary
from understudy.types.scores import Signal

logger = logging.getLogger(__name__)
SMALL = 1 << 22
"""The most parameters of a model whose threads score requests concurrently."""
CPU_CHUNK_MIB = 64
CUDA_CHUNK_MIB = 2048


def build_worker(
    args: argparse.Namespace, model: FrozenModel | None = None
) -> tuple[ScoringWorker, Manifest, Vocabulary, ReplicaMedia | None]:
    """Load the model, check it by warming up, describe it. `model`: one that is in memory already.

    Rank 0 runs this; the remaining ranks run `follow`.
    """
    frozen, media = _with_pictures(args, model or _loaded(args))
    if args.max_length > frozen.max_length:
        raise TeacherError(
            f"--max-length {args.max_length}: {args.model} holds {frozen.max_length} positions"
        )
    digest = hashed_weights(frozen.model)
    if args.world_size > 1 or args.compile or args.quantize is not None or _offloads(args):
        digest.result()  # before weights are moved or changed, or a CUDA graph is recorded
    error = None
    if args.quantize is not None:
        frozen, error = quantized(frozen, Bits(args.quantize), args.device, args.quantize_tolerance)
        logger.info("%s: weights in %s: %s", args.name, args.quantize, error)
    if _offloads(args):
        frozen = offloaded(frozen, args.offload, args.device)
    vocabulary = vocabulary_of(args.model, args.revision)
    scorer = _scorer(args, frozen, vocabulary)
    warm_up(scorer)
    manifest = Manifest(
        teacher=args.name,
        backend="native",
        model=args.model,
        weights_sha256=digest.result(),
        vocab_fingerprint=vocabulary.fingerprint,
        vocab_size=scorer.vocab,
        hidden_size=scorer.hidden_size,
        dtype=args.dtype if frozen.bits is None else f"{args.dtype}+{frozen.bits}",
        signals=list(Signal),
        limits=Limits(
            max_length=args.max_length or frozen.max_length,
            max_request_tokens=args.max_request_tokens,
            max_request_bytes=args.max_request_bytes,
            max_k=min(args.max_k, scorer.vocab if scorer.usable is None else scorer.usable.count),
        ),
        batching=RequestBatching(args.batching),
        unused_ids=[] if scorer.usable is None else list(scorer.usable.holes),
        leaves_out_ids=True,
        pictures=None if frozen.pictures is None else picture_facts(frozen.pictures),
        quantization=error,
    )
    lanes = _lanes(args, scorer)
    if lanes > 1:
        torch.set_num_threads(1)
    return ScoringWorker(scorer, RequestBatching(args.batching), lanes), manifest, vocabulary, media


def _with_pictures(args: argparse.Namespace, frozen: FrozenModel) -> tuple[FrozenModel, ReplicaMedia | None]:
    """The model with the pictures that clients will send, if it reads pictures."""
    if not is_vision(frozen.model):
        return frozen, None
    if args.world_size > 1:
        raise TeacherError(
            f"{args.model} reads pictures, and a replica that does is one process; set tensor_parallel = 1"
        )
    processor = PictureProcessor.load(args.model, args.revision)
    assert processor is not None
    media = ReplicaMedia(PictureLimits(max_bytes=args.max_request_bytes))
    return replace(frozen, pictures=PictureReader(processor, media.store)), media


def _lanes(args: argparse.Namespace, scorer: Scorer) -> int:
    """The number of requests scored concurrently, each on one thread.

    More than 1 only if the model's operations are too short to be split over threads.
    """
    if args.threads < 2 or args.world_size > 1 or args.compile:
        return 1
    small = sum(weight.numel() for weight in scorer.frozen.model.parameters()) <= SMALL
    return args.threads if small and scorer.body.cpu_forward(1) is not None else 1


def follow(args: argparse.Namespace) -> None:
    """Ranks 1 … of a replica: hold a shard of the model and score in lockstep with rank 0."""
    scorer = _scorer(args, _loaded(args), vocabulary_of(args.model, args.revision))
    assert isinstance(scorer, lockstep.LockstepScorer)
    scorer.follow()


def _loaded(args: argparse.Namespace) -> FrozenModel:
    # A model to be sharded, quantized or offloaded is loaded on the host: it may not fit on one device.
    on_host = args.world_size > 1 or args.quantize is not None or _offloads(args)
    device = "cpu" if on_host else args.device
    return load_frozen(
        args.model,
        dtype=args.dtype,
        device=device,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        attention=args.attention,
    )


def _offloads(args: argparse.Namespace) -> bool:
    """On a CPU all layers are in host memory as it is."""
    return args.offload != "0" and torch.device(args.device).type != "cpu"


def _scorer(args: argparse.Namespace, frozen: FrozenModel, vocabulary: Vocabulary) -> Scorer:
    usable = vocabulary.usable(frozen.model.get_output_embeddings().weight.shape[0])
    on_cuda = torch.device(args.device).type == "cuda"
    options = ScorerOptions(
        max_batch_tokens=args.max_batch_tokens,
        chunk_bytes=(args.chunk_mib or (CUDA_CHUNK_MIB if on_cuda else CPU_CHUNK_MIB)) << 20,
        layout=ScoringLayout(args.layout),
        compile_layers=args.compile,
        pictures_together=RequestBatching(args.batching) is RequestBatching.BY_ARRIVAL,
    )
    if args.world_size == 1:
        return Scorer(args.name, frozen, options, usable=usable)
    place = ReplicaRank(args.rank, args.world_size)
    join(place, args.rendezvous, args.device)
    return lockstep.LockstepScorer(args.name, frozen, options, place, args.device, usable)
