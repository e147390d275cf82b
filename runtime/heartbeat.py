"""Heartbeats: when a process of a run dies or falls silent, all others end within a time limit and name it.

Process 0 has a TCP connection to every other process. Both ends send a line per second from a separate thread, so a
process that compiles, restores or waits in a collective is not silent. A process that ends says goodbye before it
closes its connection. A process that has not heard from another one for too long notifies every process it can reach.
Each of them prints the reason and ends by `os._exit`, because its main thread may be in a collective that never
returns. A line contains the sender's last step and the activity of its main thread. When no main thread has made
progress for too long, process 0 ends the run and names the processes that the others wait for. A single-process run
does the same if other runs wait for it, because its service threads would otherwise answer them indefinitely.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import re
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
from pathlib import Path
from typing import Any

import jax

from runtime.descriptors import shortage
from runtime.exit_codes import ExitCode
from runtime.files import json_objects
from runtime.files.json_objects import JsonObject
from runtime.phases import Phase

_BEAT_S = 1.0
_GRACE_S = 5.0  # time for a process to report its own error after another one has failed
_NOTE_S = 1.0  # time to write the verdict to events.jsonl
_NAMED = 5  # most processes named in a message
_PROGRESS_BYTES = 1 << 20  # file traffic per beat that counts as progress: less may be log lines
_OF_A_LINK = re.compile(r"Gloo [\w -]+ failed|NCCL.*(remote process exited|network error)", re.DOTALL)
_LEAVE_S = 5.0  # time for the others to exit before process 0, whose exit ends jax's service and aborts them


@dataclass(kw_only=True)
class PeerProcess:
    """Another process of the run, at the other end of a connection."""

    process: int
    host: str
    connection: socket.socket
    unread: bytes = b""
    unsent: bytes = b""
    sending: threading.Lock = field(default_factory=threading.Lock)  # the main thread also sends
    heard_s: float = field(default_factory=time.monotonic)
    doing: tuple[str, float] = ("", 0.0)  # activity of its main thread, and its duration in seconds
    said_goodbye: bool = False
    gone: bool = False  # it closed its connection

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def send(self, **message: Any) -> None:
        """Sends as much as the connection accepts without blocking, and the remainder with the next message."""
        with self.sending, contextlib.suppress(OSError):  # reading reports errors, and a stuck peer falls silent
            self.unsent += json.dumps(message).encode() + b"\n"
            self.unsent = self.unsent[self.connection.send(self.unsent, socket.MSG_DONTWAIT) :]

    def receive(self) -> Iterator[JsonObject]:
        """Yields the messages that have arrived. Sets `gone` if the connection is closed."""
        try:
            data = self.connection.recv(1 << 20)
        except OSError:  # reset
            data = b""
        if not data:
            self.gone = True
            return
        self.heard_s = time.monotonic()
        *lines, self.unread = (self.unread + data).split(b"\n")
        # lenient: an error may quote a file name that is not UTF-8
        yield from (json_objects.parse(line, f"a message of {self}", lenient=True) for line in lines)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The reason for the end of the run, and its exit code.

    Within `grace_s` the main thread may still end on its own.
    """

    text: str
    code: int = ExitCode.RESUMABLE
    grace_s: float = 0.0
    with_stacks: bool = False  # print the stacks of the threads, to show where the processes wait


class Heartbeat:
    """Watches the other processes from a thread.

    In a single-process run, watches its main thread if other runs wait for it.
    """

    def __init__(self, note: "Callable[[Verdict, list[str]], None]" = lambda verdict, lost: None) -> None:
        """`note` receives the verdict, and the peers whose loss this process itself has detected."""
        self._note, self._noting = note, threading.Thread()
        self._me, self._silence_s, self._stall_s, self._beat_s = 0, 0.0, float("inf"), _BEAT_S
        self._peers: list[PeerProcess] = []
        self._own: dict[str, int] = {}  # last completed step of this process; replaced, never changed (threads)
        self._doing = ("", 0.0)  # activity of the main thread, and its start; replaced, not changed
        self._moved = 0, 0.0  # bytes of file traffic of this process, and the time of the last progress by it
        self._steps: dict[str, int] = {}  # last known completed steps of the other processes
        self._verdict: Verdict | None = None
        self._act_at_s = self._exit_at_s = float("inf")
        self._next_beat_s = 0.0
        self._leaving = self._has_warned = False

    def start(
        self, me: int, peers: Sequence[PeerProcess], silence_s: float, stall_s: float, *, is_awaited: bool = False
    ) -> None:
        """Starts to watch `peers`: all other processes in process 0, and process 0 in the others.

        `is_awaited`: other runs wait for this one, so it is watched even if it has only one process.
        """
        self._me, self._silence_s, self._beat_s = me, silence_s, min(_BEAT_S, silence_s / 4)
        self._stall_s = stall_s
        self._peers = list(peers)
        for peer in self._peers:
            peer.heard_s = time.monotonic()  # after connecting it had to wait for the other processes
        if peers:
            _delay_aborts()
            faulthandler.enable()  # prints the stack of an abort before its delay
        if peers or is_awaited:
            threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def completed(self, step: int) -> None:
        """Records the last step that this process completed."""
        self._own = {str(self._me): step}

    def enter(self, phase: Phase) -> None:
        """Records the phase of the main thread. `stall_s` bounds phases that have a text."""
        self._doing = (phase.doing, time.monotonic())

    def progressed_s(self) -> float:
        """Returns the monotonic time of the main thread's last progress, or now in a phase without a limit."""
        what, since_s = self._doing
        return max(since_s, self._moved[1]) if what else time.monotonic()

    def await_verdict(self, error: BaseException) -> None:
        """Waits for the verdict, which ends the program, if another process' loss may have caused an error.

        Returns if no process is lost, because then the error belongs to this process.
        """
        if self._peers and _is_about_others(error):
            time.sleep(self._silence_s + 2 * self._beat_s)

    def end(self, code: int, failure: str = "") -> int:
        """Stops the heartbeats and returns `code`. After a failure it notifies the others and ends the process at once.

        A normal exit would block, because jax waits for the others, which wait in a collective for this process.
        """
        if not self._peers:
            self._leaving = True
            return code
        if not failure:
            jax.distributed.shutdown()  # waits for all processes, while a loss is still detected
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
        except Exception:  # without this thread no loss would be detected
            with contextlib.suppress(OSError):
                traceback.print_exc()
            _exit(1)

    def _watch_peers(self) -> None:
        selector = selectors.DefaultSelector()
        for peer in self._peers:
            selector.register(peer.connection, selectors.EVENT_READ, peer)
        is_alone = not self._peers
        # process 0 may die during the grace period
        while selector.get_map() or ((is_alone or self._verdict) and not self._leaving):
            readable = selector.select(max(0.0, self._next_beat_s - time.monotonic()))
            self._turn([key.data for key, _ in readable])
            for key, _ in readable:
                if key.data.gone:
                    selector.unregister(key.fileobj)

    def _turn(self, readable: Sequence[PeerProcess]) -> None:
        """Reads from peers, acts on their messages and the time limits, and sends a beat if it is due."""
        for peer in readable:
            for message in peer.receive():
                self._take(peer, message)
        if not self._leaving:
            self._judge()
            self._carry_out()
        if time.monotonic() >= self._next_beat_s:
            self._next_beat_s = time.monotonic() + self._beat_s
            self._note_moved()
            for peer in self._peers:
                peer.send(steps=self._own, doing=self._doing_for())
            self._warn_of_shortage()

    def _warn_of_shortage(self) -> None:
        """Warns once that the file descriptors are running out. gloo then aborts, which `_delay_aborts` delays."""
        if not self._has_warned and (said := shortage()):
            self._has_warned = True
            sys.stderr.write(f"warning: process {self._me} on {socket.gethostname()}: {said}\n")
            sys.stderr.flush()

    def _take(self, peer: PeerProcess, message: JsonObject) -> None:
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
        """Ends the run if no process has made progress for too long.

        Processes in a step wait for the processes outside one.
        """
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
        return what, time.monotonic() - max(since_s, self._moved[1])

    def _note_moved(self) -> None:
        """Records whether files are being read or written, because a long save or restore is not a hang."""
        moved, before = moved_bytes(), self._moved[0]
        self._moved = moved, time.monotonic() if moved >= before + _PROGRESS_BYTES else self._moved[1]

    def _conclude(self, verdict: Verdict, lost: Sequence[str] = ()) -> None:
        """Adopts the first verdict, and passes it on."""
        if self._verdict is None and not self._leaving:
            self._verdict, self._act_at_s = verdict, time.monotonic() + verdict.grace_s
            self._tell(verdict)
            # in a thread, because a hanging network file system must not block this one
            self._noting = threading.Thread(target=self._note, args=(verdict, list(lost)), daemon=True)
            self._noting.start()

    def _carry_out(self) -> None:
        """Prints the verdict after the grace period and ends the program. Process 0 lets the others exit first."""
        now_s, verdict = time.monotonic(), self._verdict
        if verdict and now_s >= self._act_at_s:
            self._act_at_s, self._exit_at_s = float("inf"), now_s + (0.0 if self._me else _LEAVE_S)
            if verdict.with_stacks:
                faulthandler.dump_traceback()
            then = (
                "; the same command resumes from memory or the newest checkpoint"
                if verdict.code == ExitCode.RESUMABLE
                else ""
            )
            said = f"error: {verdict.text}; last completed step: {self._last_steps()}{then}"
            with contextlib.suppress(OSError):  # of a file on a full disk, which may be the failure
                sys.stderr.write(f"{said}\n")  # in one write, because jax's threads may print, too
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
    """Delays an abort by 6 s, because jax may abort the others before they print the reason when process 0 dies.

    The handler of SIGABRT is libc's `sleep`, which gets the number of the signal, 6, as its argument. A Python handler
    would run too late.
    """
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def moved_bytes() -> int:
    """Returns the bytes of files that this process has read and written, or 0 where the system does not count them."""
    try:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["rchar"]) + int(counts["wchar"])
    except (OSError, ValueError, KeyError):
        return 0


def is_of_a_link(error: BaseException) -> bool:
    """Whether an error, or one in its chain, is an error of gloo or NCCL for a broken connection."""
    return any(_OF_A_LINK.search(str(each)) for each in _chain(error))


def _is_about_others(error: BaseException) -> bool:
    """Whether an error, or one in its chain, is from jax or gloo, which raises ValueError or JaxRuntimeError."""
    return any(isinstance(each, jax.errors.JaxRuntimeError) or "gloo" in str(each).lower() for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
