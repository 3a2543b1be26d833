"""Mutations of the code that shares results between rows: in a copy of the package, each makes the code ignore the
pictures, and a test with equal ids and different pictures must fail."""

from pathlib import Path

import pytest
from mutations import Mutation, assert_test_fails

IMAGES = "unit/images"
SHARING = f"{IMAGES}/test_pictures_are_not_mixed_up.py"
TEACHER = f"{IMAGES}/test_teacher_pictures.py"
pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

MUTATIONS = {
    "the teacher's cache": Mutation(
        "teacher/pool/cache.py",
        "item.signal.value, item.k, item.media)",
        "item.signal.value, item.k)",
        f"{TEACHER}::test_the_pools_probe_and_its_score_cache_take_pictures_into_account",
    ),
    "the echo of a request": Mutation(
        "teacher/protocol.py",
        '    found.update("".join(media).encode())\n',
        "",
        f"{TEACHER}::test_the_keys_of_the_score_cache_and_request_digests_depend_on_the_pictures",
    ),
    "generations of a session in flight": Mutation(
        "rollout/workers/sessions.py",
        '        digest.update("".join(media).encode())\n',
        "",
        f"{SHARING}::test_a_repeated_session_reuses_a_generation_only_for_the_same_pictures",
    ),
    "shared beginnings in scoring": Mutation(
        "teacher/scoring/body.py",
        "        if is_vision(frozen.model):\n            # Packed",
        "        if False:\n            # Packed",
        f"{SHARING}::test_each_row_of_a_scoring_request_is_scored_with_its_own_picture",
        also=("teacher/scoring/body.py", "self.layout = layout\n", "self.layout = ScoringLayout.PACKED\n"),
    ),
    "packed rows in training": Mutation(
        "policy/forward/forward.py",
        "    if is_vision(model):  # packed",
        "    if False:  # packed",
        f"{IMAGES}/test_policy_pictures.py::test_rows_with_equal_ids_and_different_pictures_get_different_logprobs",
    ),
    "the prefix tree of the engine": Mutation(
        "engines/local/padded.py",
        "            [row.request.media for row in rows],\n",
        "            [rows[prefix_tree(ids).nodes_BL[:, -1].tolist().index(node)].request.media\n"
        "             for node in prefix_tree(ids).nodes_BL[:, -1].tolist()],\n",
        f"{IMAGES}/test_engine_pictures.py::test_rows_with_equal_ids_get_the_logprobs_of_their_own_pictures",
    ),
    "features of the vision tower, in training": Mutation(
        "nn/vision_features.py",
        "{name: arrays[name] for name in group}",
        "{name: arrays[chunk[0]] for name in group}",
        f"{IMAGES}/test_policy_pictures.py::test_rows_with_equal_ids_and_different_pictures_get_different_logprobs",
    ),
    "features of the vision tower, in scoring": Mutation(
        "nn/vision_features.py",
        "{name: arrays[name] for name in group}",
        "{name: arrays[chunk[0]] for name in group}",
        f"{SHARING}::test_each_row_of_a_scoring_request_is_scored_with_its_own_picture",
    ),
    "features that are kept": Mutation(
        "nn/vision_features.py",
        "found[name] = kept\n",
        "found = dict.fromkeys(names, kept)\n",
        f"{IMAGES}/test_vision_features.py::test_pictures_computed_together_get_the_same_features_as_each_alone",
    ),
    "features of pictures that are new together": Mutation(
        "nn/vision_features.py",
        "in zip(arrays.items(), split, strict=True)",
        "in zip(arrays.items(), list(split)[::-1], strict=True)",
        f"{IMAGES}/test_vision_features.py::test_pictures_computed_together_get_the_same_features_as_each_alone",
    ),
    "features after new weights": Mutation(
        "engines/local/engine.py",
        "                self._features.clear()\n",
        "                pass\n",
        f"{IMAGES}/test_vision_features.py::test_sessions_of_a_prompt_share_cached_features_and_new_weights_drop_them",
    ),
    "arrays of a processor": Mutation(
        "media/processor.py",
        "            if (found := self._cache.get(name)) is not None:\n",
        "            name = next(iter(self._cache), name)\n"
        "            if (found := self._cache.get(name)) is not None:\n",
        f"{SHARING}::test_a_picture_reader_caches_arrays_by_picture",
    ),
    "equal prompts on the page": Mutation(
        "viewer/rows.py",
        '"".join([str(line.get("prompt", "")), *media_of(line)])',
        'str(line.get("prompt", ""))',
        "unit/viewer/test_pictures.py::test_prompts_with_equal_text_and_different_pictures_are_different_prompts",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_test_fails_when_code_that_shares_results_ignores_the_pictures(name: str, tmp_path: Path) -> None:
    assert_test_fails(name, MUTATIONS[name], tmp_path)
