"""The read side: what a log tells about a job. Pure functions over records; no I/O, no clock of their own.

`status_of` is how the job stands, `report_of` the whole story, `explanation_of` why one thing happened, `incident_of` one
incident, `timeline_of` and `goodput_of` where the time went, `hosts_of` what is known of the hosts. `render` makes text of them
and `plain` values that JSON can hold.
"""

from __future__ import annotations

from dlrover_core.history.explain import Explanation, explanation_of
from dlrover_core.history.goodput import Goodput, goodput_of
from dlrover_core.history.headline import Headline, Headlines
from dlrover_core.history.hosts import HostRow, HostsTold, hosts_of
from dlrover_core.history.incidents import Story
from dlrover_core.history.report import Report, ReportBuilder, TakeOver, report_of
from dlrover_core.history.status import Status, status_of
from dlrover_core.history.story import IncidentTold, incident_of
from dlrover_core.history.timeline import CLASSES, Segment, Timeline, TimelineBuilder, timeline_of

__all__ = [
    "CLASSES",
    "Explanation",
    "Goodput",
    "Headline",
    "Headlines",
    "HostRow",
    "HostsTold",
    "IncidentTold",
    "Report",
    "ReportBuilder",
    "Segment",
    "Status",
    "Story",
    "TakeOver",
    "Timeline",
    "TimelineBuilder",
    "explanation_of",
    "goodput_of",
    "hosts_of",
    "incident_of",
    "report_of",
    "status_of",
    "timeline_of",
]
