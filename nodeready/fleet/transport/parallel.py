"""Conversations with many nodes in parallel, each in a greenlet."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import gevent
from gevent.queue import Empty, Queue

from nodeready.agent.asking import (
    Answer,
    Conversation,
    Exchange,
    Key,
    Outcomes,
    ResultT,
    Transport,
    bug_text,
    end_all,
    exchanges_of,
    interrupted,
    late,
)
from nodeready.core.outcome import FAILED, Gap


class ParallelTransport(Transport):
    """Holds each conversation in a greenlet."""

    @abstractmethod
    def holders(
        self, exchanges: Mapping[Key, Exchange[ResultT]]
    ) -> Iterator[tuple[Key, Callable[[], None]]]:
        """For each conversation, a function that holds it from its first question to its end."""

    @abstractmethod
    def is_reached(self, key: Key) -> bool:
        """Whether the node of this conversation is connected."""

    def converse(
        self, conversations: Mapping[Key, Conversation[ResultT]], deadline: float | None = None
    ) -> Outcomes[ResultT]:
        exchanges = exchanges_of(conversations)
        ended_keys: Queue[Key] = Queue()
        jobs: list[Any] = []
        is_interrupted = False

        def hold_to_end(exchange: Exchange[ResultT], hold: Callable[[], None]) -> None:
            try:
                hold()
            except Exception as error:  # noqa: BLE001 - our bug fails only this node
                exchange.end(Answer(gap=Gap(FAILED, bug_text(error))))

        def note_end(key: Key, _: object) -> None:
            ended_keys.put(key)

        try:
            for key, hold in self.holders(dict(exchanges)):
                job = gevent.spawn(hold_to_end, exchanges[key], hold)
                job.link(partial(note_end, key))
                jobs.append(job)
            while exchanges:
                remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                key = ended_keys.get(timeout=remaining_s)
                yield key, exchanges.pop(key).outcome
        except Empty:
            reached = {key for key in exchanges if self.is_reached(key)}
            gevent.killall(jobs, block=False)
            if reached:
                self.end(2)
            yield from end_all(exchanges, lambda key: late(key in reached))
        except KeyboardInterrupt:
            self.interrupted = is_interrupted = True
            gevent.killall(jobs, block=False)
            yield from end_all(exchanges, lambda key: interrupted())
        finally:
            gevent.killall(jobs, block=False)
            if is_interrupted:
                self.end()
