"""What workers on one machine cost each other, measured; limits are generous, for machines that others use too."""

import json

import pytest

from bench.command import main

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_neighbours_cost_their_share_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["neighbours", "--json", "--seconds", "4"]) == 0
    row = json.loads(capsys.readouterr().out)
    print(json.dumps(row, indent=1))
    # One thread beside a busy one loses the time, not the speed while it runs.
    assert row["busy_kept_pct"] > 60
    # Two workers take no longer than one after the other would.
    assert row["pair_sum_pct"] > 60
    # Niceness is heard: they share a session. 75 % on a quiet machine.
    assert row["nice_share_pct"] > 55
