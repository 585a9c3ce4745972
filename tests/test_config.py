"""Settings from flags, environment and file: what wins, and what a wrong value is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from superfluidd import config
from superfluidd.errors import UsageError
from superfluidd.scheduling.policy import Policy
from superfluidd.types import QosClass


def test_flags_beat_the_environment_which_beats_the_file_which_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "superfluidd.toml"
    file.write_text("max-batch = 3\ntop-k = 7\nstarvation-ticks = 5\nno-http-qos-header = true\n")
    environ = {"SUPERFLUIDD_MAX_BATCH": "4", "SUPERFLUIDD_TOP_K": "9", "SUPERFLUIDD_AGENT_PREEMPTS_BACKGROUND": "Yes"}
    settings = config.load({"max_batch": "5"}, config=file, environ=environ)
    assert (settings.max_batch, settings.top_k, settings.starvation_ticks) == (5, 9, 5)
    assert settings.no_http_qos_header
    assert settings.agent_preempts_background
    assert settings.prefill_budget == 4096


def test_the_schedulers_settings_become_its_policy() -> None:
    settings = config.load(
        {
            "starvation_ticks": "3",
            "prefill_budget": "0",
            "tick_decode_budget": "64",
            "tick_target_ms": "150",
            "agent_preempts_background": "on",
            "class_lanes": "Background_Agent=2, agent=6",
            "http_default_qos": "0",
        },
        environ={},
    )
    assert settings.policy == Policy(3, 0, 64, 0.15, agent_preempts_background=True)
    assert settings.caps == {QosClass.BACKGROUND: 2, QosClass.AGENT: 6}
    assert settings.class_lanes == "agent=6,background=2"
    assert settings.http_default_qos == "interactive"
    assert config.load({}, environ={}).policy == Policy()
    assert config.load({}, environ={}).caps == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prefill_budget": "63"}, "--prefill-budget: '63' is not a whole number from 64 to 4096, or 0"),
        ({"prefill_budget": "4097"}, "from 64 to 4096, or 0"),
        ({"starvation_ticks": "0"}, "--starvation-ticks: '0' is not a whole number from 1"),
        ({"tick_decode_budget": "-1"}, "from 0 to"),
        ({"tick_target_ms": "1.5"}, "--tick-target-ms: '1.5' is not a whole number"),
        ({"http_default_qos": "urgent"}, "--http-default-qos: 'urgent' is not a QoS class; legal: interactive, "),
        ({"class_lanes": "background"}, "--class-lanes: 'background' is not CLASS=LANES"),
        ({"class_lanes": "agent=1,foreground=2"}, "agent is capped twice"),
        ({"class_lanes": "agent=0"}, "--class-lanes: 'agent=0': the lanes of a class are a whole number from 1"),
        ({"class_lanes": "agent=5", "max_batch": "4"}, "class-lanes: 'agent=5': .* from 1 to 4"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_legal(flags: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config.load(flags, environ={})


def test_a_wrong_switch_in_the_file_or_the_environment(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="SUPERFLUIDD_NO_HTTP_QOS_HEADER: 'maybe' is not true or false"):
        config.load({}, environ={"SUPERFLUIDD_NO_HTTP_QOS_HEADER": "maybe"})
    file = tmp_path / "superfluidd.toml"
    file.write_text("class-lanes = 3\n")
    with pytest.raises(UsageError, match="class-lanes: 3 is not CLASS=LANES"):
        config.load({}, config=file, environ={})
