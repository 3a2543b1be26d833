"""The simulation compared with cases that can be worked out by hand."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from understudy.errors import ConfigError
from understudy.planning.simulation.inputs import (
    Costs,
    SimulatedBatching,
    Split,
    StepTime,
    Work,
    enough_steps,
    quantile_lengths,
    sync_windows,
)
from understudy.planning.simulation.phase_times import lengths_like
from understudy.planning.simulation.recommend import Devices, recommend
from understudy.planning.simulation.simulate import simulate
from understudy.planning.windows import Windows

CONSTANT = Work((100,), max_batch=32)
COSTS = Costs(StepTime.affine(0.01, 0.001), score_row=0.02, update_fixed=0.3, update_token=0.001, publish=0.1)


@pytest.mark.parametrize("batching", SimulatedBatching)
def test_a_sync_step_is_the_sum_of_its_phases(batching: SimulatedBatching) -> None:
    work = Work((100,), max_batch=32, batching=batching)
    found = simulate(COSTS, work, sync_windows(32, 8), Split(1, 1, 4))
    generate, score, update, publish = 100 * (0.01 + 32 * 0.001), 32 / 4 * 0.02, 0.3 + 0.001 * 3200, 0.1
    step = generate + score + update + publish
    assert found.step_seconds == pytest.approx(step)
    assert found.rows_per_second == pytest.approx(32 / step)
    assert found.rollout_idle == pytest.approx(1 - generate / step)
    assert found.trainer_idle == pytest.approx(1 - (update + publish) / step)
    assert found.teacher_idle == pytest.approx(1 - score / step)
    assert found.occupancy == pytest.approx(generate / step)


def test_a_sync_step_of_more_rows_than_engine_slots_is_simulated_in_waves() -> None:
    """Two engines with 8 slots, 32 rows: two waves each; the prompt pass delays every row of the engine."""
    costs = Costs(
        StepTime.affine(0.02), prefill_token=0.001, host_row=0.0, score_token=0.0001, update_token=0.001
    )
    work = Work((50,), prompt_tokens=10, max_batch=8, n=4)
    found = simulate(costs, work, sync_windows(8, 6), Split(2, 4, 16))
    wave = 50 * 0.02 + 8 * 10 * 0.001
    # The first wave is scored while the second is generated; 16 replicas score the last 16 rows at once.
    assert found.step_seconds == pytest.approx(2 * wave + 60 * 0.0001 + 32 * 60 * 0.001 / 4)


def test_the_head_start_during_scoring_shortens_a_sync_step_and_not_an_async_one() -> None:
    """An async trainer has other rows to train on while teachers score."""
    work, split = Work((100,), max_batch=32), Split(1, 1, 4)
    plain, ahead = COSTS, replace(COSTS, ahead_token=0.0004)
    sync = [simulate(costs, work, sync_windows(32, 8), split).step_seconds for costs in (plain, ahead)]
    assert sync[0] - sync[1] == pytest.approx(0.0004 * 3200)
    stale = [simulate(costs, work, Windows(32, 1, 1.0, 32), split) for costs in (plain, ahead)]
    assert stale[0] == stale[1]


def test_sync_waits_for_one_straggler_and_staleness_hides_it() -> None:
    """31 rows of 10 tokens and one of 310 in every batch, at 10 ms per token for any batch size."""
    costs = Costs(StepTime.affine(0.01), update_fixed=1.0)
    work = Work((*[10] * 31, 310), max_batch=32)
    straggling = simulate(costs, work, sync_windows(32, 64), Split(1, 1, 0))
    drawn = straggling.step_seconds - 1.0  # a batch may have no straggler, or two
    assert 0.6 * 3.1 < drawn < 3.1
    ahead = simulate(costs, work, Windows(32, 1, 4.0, 64), Split(1, 1, 0))
    assert ahead.step_seconds == pytest.approx(1.0, rel=0.15), "the trainer is the bottleneck again"
    assert ahead.trainer_idle < 0.15 < straggling.trainer_idle


def test_a_long_row_decodes_faster_after_the_short_row_of_its_batch_has_ended() -> None:
    """Batches of two rows of 10 or 110 tokens, computed by hand."""
    costs = Costs(StepTime.affine(0.01, 0.005), update_fixed=0.5)
    found = simulate(costs, Work((10, 110), max_batch=2, n=2), sync_windows(1, 6), Split(1, 1, 0))
    drawn = np.array([10, 110])[np.random.default_rng(0).permutation(12) * 2 // 12]
    spent = [
        min(one, two) * 0.02 + abs(one - two) * 0.015 + 0.5
        for one, two in zip(drawn[::2], drawn[1::2], strict=True)
    ]
    assert found.step_seconds == pytest.approx(np.mean(spent[3:6]))


def test_a_decode_step_reads_the_kv_cache_of_the_running_rows() -> None:
    """Batches of two rows of 10 or 110 tokens after prompts of 20, computed by hand: with every step the cache grows by
    one token per row, and it shrinks by a row's whole cache when the row ends."""
    costs = Costs(StepTime.affine(0.01), decode_cached=0.0001, prefill_pass=0.25, update_fixed=0.5)
    work = Work((10, 110), prompt_tokens=20, max_batch=2, n=2)
    found = simulate(costs, work, sync_windows(1, 6), Split(1, 1, 0))
    drawn = np.array([10, 110])[np.random.default_rng(0).permutation(12) * 2 // 12]

    def seconds(one: int, two: int) -> float:
        short, long = sorted((one, two))
        both, alone = (
            2 * (20 + short / 2),
            20 + (short + long) / 2,
        )  # cached tokens, on average over the steps
        return 0.25 + long * 0.01 + 0.0001 * (short * both + (long - short) * alone) + 0.5

    spent = [seconds(one, two) for one, two in zip(drawn[::2], drawn[1::2], strict=True)]
    assert found.step_seconds == pytest.approx(np.mean(spent[3:6]))


def test_kept_keys_and_values_save_the_prefill_at_a_publish() -> None:
    costs = Costs(StepTime.affine(0.01), prefill_token=0.001, update_fixed=0.5)
    work, schedule = Work((50,), prompt_tokens=10, max_batch=16), Windows(16, 1, 1.0, 16)
    anew, kept = (
        simulate(costs, replace(work, recompute_kv=recompute), schedule, Split(1, 1, 0))
        for recompute in (True, False)
    )
    assert kept.step_seconds < 0.95 * anew.step_seconds


def test_the_kv_cache_is_empty_after_its_rows_have_ended() -> None:
    """A later batch of the same engine takes as long as the first, with either kind of batching."""
    costs = Costs(StepTime.affine(0.01), decode_cached=0.0001)
    for batching in SimulatedBatching:
        work = Work((50,), prompt_tokens=10, max_batch=4, n=8, batching=batching)
        found = simulate(costs, work, sync_windows(1, 40), Split(1, 1, 0))
        assert found.step_seconds == pytest.approx(2 * (50 * 0.01 + 0.0001 * 50 * 4 * 35)), batching


def test_a_small_number_of_rows_is_drawn_from_the_whole_length_distribution() -> None:
    """24 rows are drawn from 1,000 lengths: their mean is that of the distribution and not of its lower end."""
    costs = Costs(StepTime.affine(0.01), update_token=1.0)
    found = simulate(costs, Work(tuple(range(1, 1001)), max_batch=4), sync_windows(4, 6), Split(1, 1, 0))
    assert 1200 < found.step_seconds < 2800


def test_a_trainer_that_is_the_bottleneck_is_never_idle() -> None:
    found = simulate(COSTS, CONSTANT, Windows(32, 1, 1.0, 24), Split(4, 1, 4))
    assert found.rows_per_second == pytest.approx(32 / (0.3 + 3.2 + 0.1))
    assert found.trainer_idle == pytest.approx(0.0, abs=1e-9)


def test_uneven_update_times_cost_throughput_only_when_the_queue_is_short() -> None:
    """If the trainer is the bottleneck, the mean step time is unchanged. If both sides are about equally fast, each waits
    for the other at times."""
    even = Costs(StepTime.affine(0.01), update_fixed=1.0)
    uneven = Costs(StepTime.affine(0.01), update_fixed=1.0, update_spread=0.5)
    ahead = Windows(32, 1, 8.0, 600)
    bound = simulate(uneven, Work((20,), max_batch=32), ahead, Split(1, 1, 0))
    assert bound.step_seconds == pytest.approx(1.0, rel=0.05)
    close = Windows(32, 1, 1.0, 300)
    steady, varying = (
        simulate(costs, CONSTANT, close, Split(1, 1, 0)).step_seconds for costs in (even, uneven)
    )
    assert steady == pytest.approx(1.0) and 1.05 < varying < 1.4


def test_publishing_every_third_step_divides_the_publish_time_by_three() -> None:
    costs = Costs(StepTime.affine(0.001), update_fixed=1.0, publish=0.6)
    found = simulate(costs, CONSTANT, Windows(32, 3, 1.0, 36), Split(8, 1, 0))
    assert found.step_seconds == pytest.approx((3 * 1.0 + 0.6) / 3)


def test_engines_that_are_the_bottleneck_are_never_idle() -> None:
    found = simulate(COSTS, CONSTANT, Windows(32, 1, 4.0, 40), Split(1, 100, 4))
    assert found.rows_per_second == pytest.approx(32 / (100 * (0.01 + 0.032)), rel=0.01)
    assert found.rollout_idle < 0.01 and found.occupancy > 0.99


def test_teachers_that_are_the_bottleneck_set_the_throughput() -> None:
    costs = Costs(StepTime.affine(0.001), score_row=0.5, update_fixed=0.1)
    found = simulate(costs, CONSTANT, Windows(32, 1, 2.0, 30), Split(2, 1, 4))
    assert found.rows_per_second == pytest.approx(4 / 0.5, rel=0.01) and found.teacher_idle < 0.01


def test_the_host_process_sets_the_throughput_when_it_is_the_bottleneck() -> None:
    costs = Costs(StepTime.affine(0.001), host_row=0.05, update_fixed=0.1)
    found = simulate(costs, CONSTANT, Windows(32, 1, 2.0, 30), Split(2, 1, 0))
    assert found.rows_per_second == pytest.approx(1 / 0.05, rel=0.01)


def test_rows_queued_during_the_warm_up_do_not_count_as_throughput() -> None:
    """Every slot is free at the start: the rows of five windows are handled at once, and the trainer uses them up for a
    while. In the long run its throughput is that of the host process."""
    costs = Costs(StepTime.affine(0.0001), host_row=0.05, update_fixed=0.2)
    work = Work(quantile_lengths([10, 100, 20_000]), max_batch=64)
    schedule = Windows(32, 1, 4.0, enough_steps(4.0))
    found = simulate(costs, work, schedule, Split(8, 1, 0))
    assert found.rows_per_second == pytest.approx(1 / 0.05, rel=0.03)


def test_staleness_zero_is_simulated_as_sync() -> None:
    work = Work(quantile_lengths([5, 20, 60, 400]), max_batch=32)
    sync = simulate(COSTS, work, sync_windows(32, 10), Split(1, 1, 4))
    assert simulate(COSTS, work, Windows(32, 1, 0.0, 10), Split(1, 1, 4)) == sync


def test_without_partial_rollouts_a_publish_waits_for_the_running_rows() -> None:
    """Two windows of slots, rows of 1 s, an update of 0.4 s: with the drain, every publish comes after the newest rows."""
    costs = Costs(StepTime.affine(0.01), update_fixed=0.4, publish=0.1)
    schedule = Windows(8, 1, 1.0, 40)
    partial = simulate(costs, CONSTANT, schedule, Split(1, 1, 0))
    drained = simulate(costs, CONSTANT, schedule, Split(1, 1, 0), partial_rollouts=False)
    # Drained: rows and update side by side, then the publish alone: 1 s of rows, 0.1 s of publish for each window.
    assert drained.step_seconds == pytest.approx(1.1)
    # Partial: a window is rolled out over 1 s, two of them interleave; slots come back every (1 + 0.4 + 0.1) / 2 s.
    assert partial.step_seconds == pytest.approx(0.75)


def test_interrupted_rows_pay_for_a_prefill_of_their_tokens() -> None:
    free = Costs(StepTime.affine(0.01), update_fixed=0.4, publish=0.1)
    paid = Costs(StepTime.affine(0.01), prefill_token=0.0005, update_fixed=0.4, publish=0.1)
    schedule, split = Windows(8, 1, 1.0, 40), Split(1, 1, 0)
    assert (
        simulate(paid, CONSTANT, schedule, split).rows_per_second
        < 0.95 * simulate(free, CONSTANT, schedule, split).rows_per_second
    )


def test_overlapping_phases_gains_nothing_when_all_roles_share_one_device() -> None:
    """With all phases on one GPU a row costs the same device time, however they overlap."""
    costs = Costs(StepTime.affine(0.01), score_row=0.01, update_fixed=0.5)
    alone = Split(1, 1, 1, capacity=1.0)
    sync = simulate(costs, CONSTANT, sync_windows(32, 12), alone)
    ahead = simulate(costs, CONSTANT, Windows(32, 1, 1.0, 24), alone)
    apart = simulate(costs, CONSTANT, Windows(32, 1, 1.0, 24), Split(1, 1, 1))
    assert sync.step_seconds == pytest.approx(1.0 + 0.32 + 0.5)
    assert ahead.step_seconds == pytest.approx(sync.step_seconds, rel=0.08)
    assert apart.step_seconds == pytest.approx(1.0, rel=0.08), (
        "with devices of their own the slowest side decides"
    )


def test_recommend_finds_the_best_split_of_eight_devices() -> None:
    costs = Costs(
        StepTime.affine(0.01, 0.0005), score_token=0.0002, update_fixed=0.1, update_token=0.0004, publish=0.05
    )
    work, schedule = Work(quantile_lengths([20, 80, 200]), max_batch=16), Windows(32, 1, 2.0, 16)
    everything = {
        (engines, trainer, 8 - engines - trainer): simulate(
            costs, work, schedule, Split(engines, trainer, 8 - engines - trainer)
        ).rows_per_second
        for engines in range(1, 7)
        for trainer in range(1, 8 - engines)
    }
    found = recommend(Devices(8), costs, work, schedule)
    assert found.devices == 8
    assert found.prediction.rows_per_second >= 0.99 * max(everything.values())


def test_recommend_respects_the_devices_per_unit_and_gives_none_to_teachers_without_cost() -> None:
    costs = Costs(StepTime.affine(0.01), update_fixed=0.1, update_token=0.0002)
    found = recommend(Devices(13, per_engine=2, trainer_step=4), costs, CONSTANT, Windows(32, 1, 1.0, 12))
    assert found.split.replicas == 0 and found.split.trainer % 4 == 0
    assert found.devices == 2 * found.split.engines + found.split.trainer <= 13
    with pytest.raises(ConfigError, match=r"5 devices cannot hold.*engine takes 2.*trainer 4"):
        recommend(Devices(5, per_engine=2, trainer_step=4), costs, CONSTANT, Windows(32, 1, 1.0, 12))


def test_lengths_like_reproduces_the_measured_mean_and_longest_row() -> None:
    for mean, longest, cap in (
        (300.0, 1500.0, 2048),
        (4.8, 8.0, 8),
        (100.0, 100.0, 128),
        (900.0, 2048.0, 2048),
    ):
        lengths = lengths_like(mean, longest, cap, rows=256)
        assert np.mean(lengths) == pytest.approx(mean, rel=0.03) and max(lengths) <= cap
        drawn = np.random.default_rng(0).choice(lengths, (400, 256)).max(axis=1)
        assert drawn.mean() == pytest.approx(longest, rel=0.1)


def test_the_decode_time_is_interpolated_and_extrapolated_along_its_last_segment() -> None:
    time = StepTime((1, 64, 256), (0.010, 0.012, 0.020))
    assert time(0) == 0.010 and time(64) == 0.012
    assert time(160) == pytest.approx(0.016) and time(448) == pytest.approx(0.028)
    assert StepTime((64.0,), (0.5,))(1) == StepTime((64.0,), (0.5,))(100) == 0.5


def test_the_simulation_does_not_import_torch() -> None:
    code = "import sys, understudy.planning.simulation.phase_times, understudy.planning.simulation.recommend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
