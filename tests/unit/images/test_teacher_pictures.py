"""A native replica scores rows with pictures as plain transformers does, and never mixes pictures up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from teacher_rig import TOKEN, await_ready, spawn_replica
from test_engine_pictures import processor_vocabulary
from test_policy_pictures import PICTURES, ROWS, batch_with_pictures
from transformers import AutoModelForImageTextToText
from vision_models import CONTEXT, FAMILIES, folder_of, make_model, picture, plain_inputs, reader_of

from understudy.assembly.teachers.fit import check_patching
from understudy.errors import TeacherError
from understudy.media.pictures import PictureLimits
from understudy.media.store import MediaStore
from understudy.serving.endpoint import Endpoint
from understudy.teacher.clients.http import RequestRefused
from understudy.teacher.clients.native import ReplicaClient, connect_native
from understudy.teacher.pool.cache import item_digest
from understudy.teacher.pool.integrity import check_row, check_same, identify
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.options import PoolOptions
from understudy.teacher.pool.pool import TeacherPool
from understudy.teacher.protocol import decode_request, encode_request, request_of
from understudy.teacher.replica.media import ReplicaMedia
from understudy.teacher.scoring.body import ScoringLayout
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.probe import PROBE_PICTURE, ProbePicture, probe_items
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions
from understudy.teacher.scoring.warm_up import warm_up
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds


def items_of(folder: Path, store: MediaStore) -> list[ScoreItem]:
    batch = batch_with_pictures(folder, store)
    return [
        ScoreItem(
            batch.keys[i],
            batch.tokens[i].numpy().astype(np.int32),
            np.flatnonzero(batch.loss_mask[i].numpy()).astype(np.int32),
            Signal.TOPK,
            k=4,
            media=batch.media[i],
        )
        for i in range(len(batch))
    ]


def expected(folder: Path, item: ScoreItem, pictures: Sequence[bytes]) -> torch.Tensor:
    """float32 [P, V]: the teacher's log-probabilities over all ids but the placeholders, by a forward of this row
    alone."""
    hidden = list(reader_of(folder, MediaStore(folder)).processor.placeholder_ids)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(**plain_inputs(folder, item.tokens, list(pictures)), use_cache=False).logits[0].float()
    logits[:, hidden] = -torch.inf
    return logits.log_softmax(-1)[torch.from_numpy(item.positions.astype(np.int64)) - 1]


def check_scores(scores: TeacherScores, item: ScoreItem, reference: torch.Tensor) -> None:
    written = torch.from_numpy(item.tokens[item.positions].astype(np.int64))
    np.testing.assert_allclose(
        scores.sampled_logprobs, reference.gather(1, written[:, None])[:, 0], atol=1e-5
    )
    assert scores.logprobs is not None
    np.testing.assert_allclose(scores.logprobs, reference.topk(4).values, atol=1e-5)


class Started:
    """A real replica process."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self.replica = spawn_replica(folder, tmp_path)
        self.url = await_ready(self.replica, tmp_path)

    def score(self, items: list[ScoreItem], media: MediaStore | None, **options: Any) -> list[TeacherScores]:
        async def ask() -> list[TeacherScores]:
            async with ReplicaClient(self.url, TOKEN, teacher="t", media=media, **options) as client:
                return await client.score(items)

        return asyncio.run(ask())


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_rows_with_pictures_equal_plain_transformers(family: str, tmp_path: Path) -> None:
    folder, store = folder_of(family, seed=3), MediaStore(tmp_path)
    frozen = replace(load_frozen(str(folder)), pictures=reader_of(folder, store))
    scorer = Scorer("t", frozen)
    warm_up(scorer)
    items = items_of(folder, store)
    found = scorer.score(request_of(items)).split()
    for item, own, shown in zip(items, found, ROWS, strict=True):
        check_scores(own, item, expected(folder, item, [PICTURES[place] for place in shown]))
    assert family.startswith("qwen") or scorer.frozen.pictures is not None


def test_a_scorer_that_reads_pictures_refuses_packed_rows(tmp_path: Path) -> None:
    frozen = load_frozen(str(folder_of("qwen3_vl")))
    with pytest.raises(TeacherError, match="reads pictures and scores padded rows"):
        Scorer("t", frozen, ScorerOptions(layout=ScoringLayout.PACKED))


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(folder_of("qwen3_vl", seed=3), tmp_path_factory.mktemp("replica"))
    yield started
    started.replica.end()


def test_a_replica_scores_pictures_sent_earlier_and_refuses_unknown_ones(
    replica: Started, tmp_path: Path
) -> None:
    folder, store = folder_of("qwen3_vl", seed=3), MediaStore(tmp_path)
    reader = reader_of(folder, store)
    items = items_of(folder, store)
    usable = UsableIds(1 << 20).without(reader.processor.placeholder_ids)
    found = replica.score(items, store, usable=usable)
    for item, own, shown in zip(items, found, ROWS, strict=True):
        check_scores(own, item, expected(folder, item, [PICTURES[place] for place in shown]))
    # The replica has the pictures now, so a client need not have them.
    again = replica.score(items, None, usable=usable)
    np.testing.assert_array_equal(found[1].sampled_logprobs, again[1].sampled_logprobs)
    new = replace(items[0], media=(store.put(picture("white", (40, 24), (1, 1))),))
    with pytest.raises(RequestRefused, match="is not known here"):
        replica.score([new], None, usable=usable)


def test_swapping_the_pictures_of_a_row_changes_its_scores(replica: Started, tmp_path: Path) -> None:
    folder, store = folder_of("qwen3_vl", seed=3), MediaStore(tmp_path)
    items = items_of(folder, store)
    same_size = [store.put(picture(colour, (40, 24), (3, 3))) for colour in ("orange", "purple")]
    reader = reader_of(folder, store)
    half = items[0].tokens
    two = np.concatenate([half[: items[0].positions[0]], half])
    item = ScoreItem(
        "two", two, items[0].positions + len(two) - len(half), Signal.TOPK, 4, media=tuple(same_size)
    )
    swapped = replace(item, key="swapped", media=tuple(reversed(same_size)))
    assert reader.within("two", two, item.media) == item.media
    first, second = replica.score([item, swapped], store)
    assert np.abs(first.sampled_logprobs - second.sampled_logprobs).max() > 1e-3
    for scores, one in ((first, item), (second, swapped)):
        check_scores(scores, one, expected(folder, one, [store.get(name) for name in one.media]))


def test_a_row_whose_placeholders_do_not_match_its_pictures_is_refused(
    replica: Started, tmp_path: Path
) -> None:
    folder, store = folder_of("qwen3_vl", seed=3), MediaStore(tmp_path)
    item = replace(items_of(folder, store)[0], media=(store.put(picture("red", (70, 70))),))
    with pytest.raises(RequestRefused, match=r"placeholder tokens; its 1 picture\(s\) need"):
        replica.score([item], store)


def test_a_file_that_is_no_picture_is_refused_and_the_replica_keeps_serving(
    replica: Started, tmp_path: Path
) -> None:
    folder, store = folder_of("qwen3_vl", seed=3), MediaStore(tmp_path)
    items = items_of(folder, store)
    bad = replace(items[0], media=(store.put(b"not a picture at all"),))
    with pytest.raises(RequestRefused, match="is not a readable picture"):
        replica.score([bad], store)
    assert len(replica.score(items, store)) == len(items)


def test_the_pools_probe_and_its_score_cache_take_pictures_into_account(
    replica: Started, tmp_path: Path
) -> None:
    """The scores in the replica's identity depend on a picture, and the pool's canary passes."""
    folder, store = folder_of("qwen3_vl", seed=3), MediaStore(tmp_path)
    items = items_of(folder, store)

    async def run() -> tuple[list[float], list[Any]]:
        spec = ReplicaSpec("0", Endpoint(replica.url, TOKEN))

        def connect(teacher: str, name: str, endpoint: Endpoint) -> Any:
            return connect_native(teacher, name, endpoint, media=store)

        pool = TeacherPool("t", [spec], options=PoolOptions(cache_bytes=1 << 20), connect=connect)
        await pool.start()
        try:
            first = await pool.score(items)
            other = [replace(items[0], media=(store.put(picture("white", (40, 24), (1, 1))),))]
            second = await pool.score(other)
            third = await pool.score([items[0]])
            return pool.fixed_scores, [await one.fetch() for one in (first[0], second[0], third[0])]
        finally:
            await pool.close()

    fixed, (first, second, third) = asyncio.run(run())
    reader = reader_of(folder, store)
    shown = ProbePicture(
        reader.processor.image_token_id, reader.processor.ids_of(reader.size(store.put(PROBE_PICTURE)))
    )
    hidden = reader.processor.placeholder_ids
    probe = probe_items(len(processor_vocabulary(folder)), CONTEXT, hidden, shown)[0]
    reference = expected(folder, probe, [PROBE_PICTURE])
    written = torch.from_numpy(probe.tokens[probe.positions].astype(np.int64))
    np.testing.assert_allclose(fixed, reference.gather(1, written[:, None])[:, 0], atol=1e-5)
    assert np.abs(first.sampled_logprobs - second.sampled_logprobs).max() > 1e-3, (
        "the key of the cache lacks the picture"
    )
    np.testing.assert_allclose(first.sampled_logprobs, third.sampled_logprobs, atol=1e-5)


def test_replicas_with_different_image_processors_are_not_accepted_as_one_teacher(replica: Started) -> None:
    async def ask() -> Any:
        async with ReplicaClient(replica.url, TOKEN, teacher="t") as client:
            return await identify(client)

    identity = asyncio.run(ask())
    facts = identity.manifest.pictures
    other = msgspec.structs.replace(facts, settings={**facts.settings, "image_mean": [0.0, 0.0, 0.0]})
    found = replace(identity, manifest=msgspec.structs.replace(identity.manifest, pictures=other))
    with pytest.raises(TeacherError, match="processor of pictures is"):
        check_same(identity, found, "1")


def test_a_teacher_that_cuts_pictures_differently_is_refused_with_both_sizes(
    replica: Started, tmp_path: Path
) -> None:
    other = make_model(
        tmp_path / "other", "qwen3_vl", image_options={"size": {"shortest_edge": 256, "longest_edge": 1024}}
    )

    async def manifest() -> Any:
        async with ReplicaClient(replica.url, TOKEN, teacher="t") as client:
            return await client.manifest()

    found = asyncio.run(manifest())
    check_patching("t", reader_of(folder_of("qwen3_vl"), MediaStore(tmp_path)), found)
    with pytest.raises(TeacherError, match=r"size: student \{.*1024.*\}, teacher \{.*4096.*\}"):
        check_patching("t", reader_of(other, MediaStore(tmp_path)), found)


def test_a_text_teacher_refuses_a_row_with_pictures(replica: Started, tmp_path: Path) -> None:
    async def manifest() -> Any:
        async with ReplicaClient(replica.url, TOKEN, teacher="t") as client:
            return await client.manifest()

    text_only = msgspec.structs.replace(asyncio.run(manifest()), pictures=None)
    items = items_of(folder_of("qwen3_vl"), MediaStore(tmp_path))
    with pytest.raises(RequestRefused, match=r"1 picture\(s\), and this teacher reads text only"):
        check_row(text_only, items[0])
    check_row(text_only, items[2])


def test_the_keys_of_the_score_cache_and_request_digests_depend_on_the_pictures(
    replica: Started, tmp_path: Path
) -> None:
    async def manifest() -> Any:
        async with ReplicaClient(replica.url, TOKEN, teacher="t") as client:
            return await client.manifest()

    found = asyncio.run(manifest())
    item = items_of(folder_of("qwen3_vl"), MediaStore(tmp_path))[0]
    other = replace(item, media=("0" * 64,))
    assert item_digest(found, item) != item_digest(found, other)
    echoes = request_of([item, other, replace(item, media=())]).digests_N
    assert len(set(echoes.tolist())) == 3
    assert decode_request(encode_request(request_of([item, other]))).media == (item.media, other.media)


def test_an_encoded_request_without_pictures_has_no_media_field(tmp_path: Path) -> None:
    item = replace(items_of(folder_of("qwen3_vl"), MediaStore(tmp_path))[2], media=())
    assert b"media" not in encode_request(request_of([item]))


def test_the_next_replica_removes_the_pictures_of_a_killed_one_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import time\nfrom understudy.media.pictures import PictureLimits\n"
        "from understudy.teacher.replica.media import ReplicaMedia\n"
        "media = ReplicaMedia(PictureLimits())\nprint(1, flush=True)\ntime.sleep(60)\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None and killed.stdout.readline()
        (folder_of_killed,) = tmp_path.iterdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        running = ReplicaMedia(PictureLimits())
        assert folder_of_killed.exists(), "the first replica still runs and keeps its pictures"
        killed.kill()
    media = ReplicaMedia(PictureLimits())
    assert not folder_of_killed.exists()
    running.close()
    media.close()
    assert not list(tmp_path.iterdir())
