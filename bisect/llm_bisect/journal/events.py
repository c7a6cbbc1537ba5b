"""The kinds of events, and what each body holds.

Every body is plain JSON. An event is written and synced before the side effect that it announces.
"""

from __future__ import annotations

STUDY_OPENED = "study_opened"  # study, command, question, plan, profile, launch, version
FINGERPRINT = "fingerprint"  # items: {class.name: text}
PROBE_ASKED = "probe_asked"  # probe, values, prompt_tokens, purpose, fresh, reason, expected_s
BOOT_STARTED = "boot_started"  # boot, probe, values, candidate
BOOT_FINISHED = "boot_finished"  # boot, outcome, facts, warnings, evidence, wall_s, free_mib
PROBE_STARTED = "probe_started"  # probe, boot
PROBE_FINISHED = "probe_finished"  # probe, boot, phase, outcome, evidence, timings, tokens, memory
PROBE_LOST = "probe_lost"  # probe, why
BOOT_ENDED = "boot_ended"  # boot, why
CONTRADICTION_SEEN = "contradiction_seen"  # text, probes
VERDICT_AMENDED = "verdict_amended"  # probe, outcome, why
REVERIFY = "reverify"  # why, differences: from here on older observations are hints only
STUDY_PAUSED = "study_paused"  # status, why
STUDY_RESUMED = "study_resumed"  # found
STUDY_CLOSED = "study_closed"  # status, answer

KINDS: frozenset[str] = frozenset(
    {
        STUDY_OPENED,
        FINGERPRINT,
        PROBE_ASKED,
        BOOT_STARTED,
        BOOT_FINISHED,
        PROBE_STARTED,
        PROBE_FINISHED,
        PROBE_LOST,
        BOOT_ENDED,
        CONTRADICTION_SEEN,
        VERDICT_AMENDED,
        REVERIFY,
        STUDY_PAUSED,
        STUDY_RESUMED,
        STUDY_CLOSED,
    }
)
