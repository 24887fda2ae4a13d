"""Events of profiles in words."""

from __future__ import annotations

from toy_concern.job import profiles

from dlrover_core.history.words import Follows, Keys, Words
from dlrover_core.words import count

WORDS: Words = {
    profiles.ProfileAsked: lambda fact: f"{fact.node} is to be profiled for {count(fact.steps, 'step')}",
    profiles.ProfileTaken: lambda fact: f"profile {fact.number} of {fact.node} lies at {fact.path}",
}
KEYS: Keys = {profiles.ProfileAsked: lambda fact: fact.number}
FOLLOWS: Follows = {
    profiles.ProfileTaken: lambda fact, known: (known.newest(profiles.ProfileAsked, fact.number),),
}
