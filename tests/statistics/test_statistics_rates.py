"""Owns: every error rate that docs/statistics.md states, over 1,000 simulations each.

- Under no difference a test finds one no more often than it says: clustered, corrected, and with early stopping.
- A known difference is found as often as the closed form says, and intervals hold the truth as often as they say.
- Each study would notice: without clusters, correction or spending the rates are far off.
- The page shows what is measured.
"""

from __future__ import annotations

import re

import pytest
from support.error_rates import BROKEN, COVERAGE, LEVEL, POWER, SIMULATIONS, STUDIES, Study, wilcoxon_power
from support.paths import ROOT

PAGE = ROOT / "docs" / "statistics.md"


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: f"{study.kind}: {study.claim}")
def test_the_rate_is_what_theory_says(study: Study) -> None:
    hits = study.hits()
    assert study.holds(hits), f"{hits} of {SIMULATIONS}, theory says {study.says} ({study.how})"


@pytest.mark.slow
def test_a_study_of_each_kind_would_notice() -> None:
    assert SIMULATIONS >= 1_000
    assert {study.kind for study in STUDIES} == {LEVEL, POWER, COVERAGE}
    controls = [study for study in STUDIES if study.how == BROKEN]
    assert {study.kind for study in controls} == {LEVEL, COVERAGE}
    for study in controls:  # held to what the sound method must hold, the broken one fails
        sound = Study(study.kind, study.claim, study.says, "equals", 0.0, study.trial)
        assert not sound.holds(study.hits())


def test_a_power_that_is_off_by_a_tenth_is_noticed() -> None:
    for study in STUDIES:
        if study.kind == POWER:
            assert not study.holds(round((study.says - 0.1) * SIMULATIONS))


@pytest.mark.slow
def test_the_page_shows_what_is_measured() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \| ([\d.]+) \| (.+) \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    shown = {claim: (kind, float(says), float(measured)) for kind, claim, says, _, measured in rows}
    assert list(shown) == [study.claim for study in STUDIES]
    for study in STUDIES:
        kind, says, measured = shown[study.claim]
        assert kind == study.kind
        assert says == pytest.approx(study.says, abs=6e-4)
        # Other processors may round a tie the other way now and then.
        assert measured == pytest.approx(study.hits() / SIMULATIONS, abs=0.004)


def test_the_closed_form_of_wilcoxon_is_the_level_without_a_difference() -> None:
    assert wilcoxon_power(0.0, 40) == pytest.approx(0.025, abs=1e-6)  # one of its two sides
