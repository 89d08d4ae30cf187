"""A worker's answer, but to questions of death: for tests of what a sweep does then."""

from __future__ import annotations

import os
import signal

from dpro.search.sweep import Answer, Question
from dpro.search.sweep import _answer as answer_alive


def answer(path: str, question: Question) -> Answer:
    if "die=1" in question.get("scale", ()):
        os.kill(os.getpid(), signal.SIGKILL)
    return answer_alive(path, question)
