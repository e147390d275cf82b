"""Ends a run within a bound when one of its processes dies or goes silent: a message that names it, never a hang.

Process 0 holds a TCP connection to every other process, and both ends of each send a line a second, from a thread of
their own: compiling, restoring or waiting in a collective is not silence. A process that ends says so before it closes
its connection. Whoever misses another for too long tells all whom it reaches; each prints what happened and ends by
`os._exit`, because its main thread may be in a collective that never returns. A line carries the last step of its
sender, and what its main thread does; what process 0 passes on, the last steps of all. When no main thread has got any
further for too long, process 0 ends the run, and says which one keeps the others waiting.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from runtime.exit_codes import ExitCode
from runtime.phases import Phase

_BEAT_S = 1.0
_GRACE_S = 5.0  # for a process to fail by itself with the error that another one failed with
_NOTE_S = 1.0  # for the verdict to be written down
_NAMED = 5  # processes, in a message
_LEAVE_S = 5.0  # for the others to leave before process 0, with which jax's service ends and aborts who is there


@dataclass(kw_only=True)
class Peer:
    """Another process of the run, at the other end of a connection."""

    process: int
    host: str
    connection: socket.socket
    unread: bytes = b""
    unsent: bytes = b""
    sending: threading.Lock = field(default_factory=threading.Lock)  # the main thread sends too
    heard_s: float = field(default_factory=time.monotonic)
    doing: tuple[str, float] = ("", 0.0)  # what its main thread does, and for how many seconds
    said_goodbye: bool = False
    gone: bool = False  # it closed its connection

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def send(self, **message: Any) -> None:
        """Sends a message as far as the connection takes it, the rest before the next one; never waits."""
        with self.sending, contextlib.suppress(OSError):  # reading it tells why; who takes nothing will be missed
            self.unsent += json.dumps(message).encode() + b"\n"
            self.unsent = self.unsent[self.connection.send(self.unsent, socket.MSG_DONTWAIT) :]

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yields the messages that are there; notes if the connection is closed."""
        try:
            data = self.connection.recv(1 << 20)
        except OSError:  # reset
            data = b""
        if not data:
            self.gone = True
            return
        self.heard_s = time.monotonic()
        *lines, self.unread = (self.unread + data).split(b"\n")
        yield from map(json.loads, lines)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the run ends, and how; after `grace_s` it ends even where the main thread does not end by itself."""

    text: str
    code: int = ExitCode.RESUMABLE
    grace_s: float = 0.0
    with_stacks: bool = False  # what the survivors were waiting in


class Heartbeat:
    """Watches the other processes from a thread; does nothing in a run of one process."""

    def __init__(self, note: "Callable[[Verdict, list[str]], None]" = lambda verdict, lost: None) -> None:
        """`note` is told the verdict, and the peers that this process itself found lost."""
        self._note, self._noting = note, threading.Thread()
        self._me, self._silence_s, self._stall_s, self._beat_s = 0, 0.0, float("inf"), _BEAT_S
        self._peers: list[Peer] = []
        self._own: dict[str, int] = {}  # this process: its last completed step; replaced whole, the threads share it
        self._doing = ("", 0.0)  # the main thread, and since when; replaced whole too
        self._steps: dict[str, int] = {}  # the same of the others, as far as it is known here
        self._verdict: Verdict | None = None
        self._act_at_s = self._exit_at_s = float("inf")
        self._leaving = False

    def start(self, me: int, peers: Sequence[Peer], silence_s: float, stall_s: float) -> None:
        """Starts to watch `peers`: every other process in process 0, process 0 in the others."""
        self._me, self._silence_s, self._beat_s = me, silence_s, min(_BEAT_S, silence_s / 4)
        self._stall_s = stall_s
        self._peers = list(peers)
        if peers:
            _delay_aborts()
            faulthandler.enable()  # before the delay, an abort says where
            threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def completed(self, step: int) -> None:
        """Notes the last step that this process completed."""
        self._own = {str(self._me): step}

    def enter(self, phase: Phase) -> None:
        """Notes what the main thread does from now on; `stall_s` bounds it if the phase is bounded."""
        self._doing = (phase.doing, time.monotonic())

    def await_verdict(self, error: BaseException) -> None:
        """If an error may come from the loss of another process, waits for the verdict on it, which ends the program.

        Returns if nobody is missed: the error is this process' own.
        """
        if self._peers and _is_about_others(error):
            time.sleep(self._silence_s + 2 * self._beat_s)

    def end(self, code: int, failure: str = "") -> int:
        """Ends the watch and returns `code`; a process that failed tells the others, and ends at once.

        At once, because jax would wait for the others at exit, while they wait in a collective for this process.
        """
        if not self._peers:
            if failure and jax.distributed.is_initialized():  # the processes have not met
                _exit(code)
            return code
        if not failure:
            jax.distributed.shutdown()  # the processes wait for each other: a loss here is still noticed
        self._leaving = True
        if failure:
            who = f"process {self._me} on {socket.gethostname()}"
            self._tell(Verdict(text=f"{who} failed: {failure}", code=code, grace_s=_GRACE_S))
        elif self._me:
            self._peers[0].send(goodbye=True)
        patience_s = time.monotonic() + _GRACE_S + _LEAVE_S
        while not self._me and not self._all_gone() and time.monotonic() < patience_s:
            time.sleep(0.02)
        if failure:
            _exit(code)
        return code

    def _watch(self) -> None:
        try:
            self._watch_peers()
        except Exception:  # nobody would notice a loss from here on
            traceback.print_exc()
            _exit(1)

    def _watch_peers(self) -> None:
        selector = selectors.DefaultSelector()
        for peer in self._peers:
            selector.register(peer.connection, selectors.EVENT_READ, peer)
        next_beat_s = 0.0
        while selector.get_map() or (self._verdict and not self._leaving):  # process 0 may die in the time of grace
            for key, _ in selector.select(max(0.0, next_beat_s - time.monotonic())):
                for message in key.data.receive():
                    self._take(key.data, message)
                if key.data.gone:
                    selector.unregister(key.fileobj)
            if not self._leaving:
                self._judge()
                self._carry_out()
            if time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + self._beat_s
                for peer in self._peers:
                    peer.send(steps=self._own, doing=self._doing_for())

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        self._steps |= message.get("steps", {})
        peer.doing = tuple(message.get("doing", peer.doing))
        peer.said_goodbye |= "goodbye" in message
        if "verdict" in message:
            peer.said_goodbye = True
            self._conclude(Verdict(**message["verdict"]))

    def _judge(self) -> None:
        now_s = time.monotonic()
        there = [peer for peer in self._peers if not peer.said_goodbye]
        died = [str(peer) for peer in there if peer.gone]
        silent = [peer for peer in there if not peer.gone and now_s - peer.heard_s > self._silence_s]
        if died:
            self._conclude(Verdict(text=f"{', '.join(died)} died (the connection closed without a goodbye)"), died)
        if silent:
            why = f"silent for {self._silence_s:g} s (stopped, or the link to it is cut)"
            names = [str(peer) for peer in silent]
            self._conclude(Verdict(text=f"{', '.join(names)}: {why}", with_stacks=True), names)
        for peer in silent:
            peer.gone = True
        if not self._me:
            self._judge_main_threads()

    def _judge_main_threads(self) -> None:
        """Ends the run if none has got any further for too long: those in a step wait for those that are not."""
        doing = {f"process 0 on {socket.gethostname()}": self._doing_for()}
        doing |= {str(peer): peer.doing for peer in self._peers}
        if all(what and for_s > self._stall_s for what, for_s in doing.values()):
            late = [f"{who} {what}" for who, (what, _) in doing.items() if what != Phase.STEPPING.doing]
            named = [*late[:_NAMED], *[f"{len(late) - _NAMED} others do not step either"][: len(late) > _NAMED]]
            if len(late) < len(doing):
                named.append(f"every {'other ' if late else ''}process {Phase.STEPPING.doing}")
            why = f"no progress for {self._stall_s:g} s (elastic.stall_s): {', '.join(named)}"
            self._conclude(Verdict(text=why, with_stacks=True))

    def _doing_for(self) -> tuple[str, float]:
        what, since_s = self._doing
        return what, time.monotonic() - since_s

    def _conclude(self, verdict: Verdict, lost: Sequence[str] = ()) -> None:
        """Takes the first verdict, and passes it on."""
        if self._verdict is None and not self._leaving:
            self._verdict, self._act_at_s = verdict, time.monotonic() + verdict.grace_s
            self._tell(verdict)
            # in a thread: a file system on a network that is gone must not hold up this one
            self._noting = threading.Thread(target=self._note, args=(verdict, list(lost)), daemon=True)
            self._noting.start()

    def _carry_out(self) -> None:
        """Says why the run ends when it is time, and ends the program; process 0 lets the others go first."""
        now_s, verdict = time.monotonic(), self._verdict
        if verdict and now_s >= self._act_at_s:
            self._act_at_s, self._exit_at_s = float("inf"), now_s + (0.0 if self._me else _LEAVE_S)
            if verdict.with_stacks:
                faulthandler.dump_traceback()
            then = (
                "; the same command goes on from memory or the newest checkpoint"
                if verdict.code == ExitCode.RESUMABLE
                else ""
            )
            said = f"error: {verdict.text}; last completed step: {self._last_steps()}{then}"
            sys.stderr.write(f"{said}\n")  # at once: jax's threads may print too
            sys.stderr.flush()
        if verdict and (now_s >= self._exit_at_s or (self._exit_at_s < float("inf") and self._all_gone())):
            self._noting.join(_NOTE_S)
            _exit(verdict.code)

    def _tell(self, verdict: Verdict) -> None:
        for peer in self._peers:
            peer.send(verdict=asdict(verdict), steps=self._steps | self._own)

    def _last_steps(self) -> str:
        """Returns for example `12 (processes 0, 2), 11 (process 1)`."""
        by_step: dict[int, list[str]] = defaultdict(list)
        for process, step in sorted((self._steps | self._own).items(), key=lambda item: int(item[0])):
            by_step[step].append(process)
        known = [f"{step} (process {', '.join(by_step[step])})" for step in sorted(by_step, reverse=True)]
        return ", ".join(known) or "none"

    def _all_gone(self) -> bool:
        return all(peer.gone for peer in self._peers)


def _delay_aborts() -> None:
    """Lets an abort wait for 6 s: when process 0 dies, jax aborts the others, maybe before they have said why they end.

    The handler of SIGABRT is libc's `sleep`: its argument is the number of the signal, 6. Python's would run too late.
    """
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_about_others(error: BaseException | None) -> bool:
    """Whether jax or gloo raised it, maybe under another one: gloo's is a ValueError or a JaxRuntimeError."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) or "gloo" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False
