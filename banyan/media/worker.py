"""The media worker process: decodes strangers' pictures and sounds, one task at a time.

A picture may be a bomb, or may use a fault in a decoder. So it is decoded in a process of its own,
with a bound on its memory, its processor time and its open files: it can open no file and no
socket. A task over its time ends the process. processes.py describes the frames.
"""

import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec
from PIL import Image

from banyan.base.child_process import LENGTH
from banyan.base.memory import give_back, let_go
from banyan.media.pixels import BadPicture, decode, digest_of, open_picture, patches_of, size_of
from banyan.media.processes import TASK, DecodedPicture, DecodedSound, PictureTask, SoundTask
from banyan.media.rules import layout_of
from banyan.media.sound import HOP, BadSound, decoded_sound

ROOM_BYTES = 256 << 20
"""Memory for a task in addition to the libraries and what its pixels take."""
PIXEL_BYTES = 24
"""Most bytes per pixel of a picture while it is decoded and resized."""


SAMPLE_BYTES = 64
"""Most bytes per sample of a sound, at 48 kHz with two channels."""


def sound_of(task: SoundTask) -> DecodedSound:
    """Decode the sound of a task."""
    try:
        return decoded_sound(task)
    except BadSound as error:
        return DecodedSound(error=str(error))
    except MemoryError:
        return DecodedSound(error="it takes too much memory to decode")


def answer_of(task: PictureTask) -> DecodedPicture:
    """Decode the picture of a task, or only read its header."""
    try:
        picture = open_picture(task.data, task.max_pixels)
        width, height = size_of(picture)
        if not task.rule:
            return DecodedPicture(width, height)
        shown = decode(picture)
        width, height = shown.size
        layout = layout_of(task.rule, width, height, task.settings)
        patches = patches_of(shown, task.rule, layout, task.settings)
        digest = digest_of(shown, task.rule, task.settings)
        return DecodedPicture(width, height, digest, patches.tobytes())
    except BadPicture as error:
        return DecodedPicture(error=str(error))
    except MemoryError:
        return DecodedPicture(error="it takes too much memory to decode")


def main() -> None:
    """Serve tasks from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    Image.init()  # loads the readers, before files can no longer be opened
    with open("/proc/self/statm", encoding="ascii") as file:
        base_bytes = int(file.read().split()[0]) * resource.getpagesize()
    let_go()
    decoder = msgspec.msgpack.Decoder(PictureTask | SoundTask)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    while len(head := tasks.read(TASK.size)) == TASK.size:
        length, time_s = TASK.unpack(head)
        _serve(decoder, tasks.read(length), time_s, base_bytes, answers)
        give_back()


def _serve(
    decoder: "msgspec.msgpack.Decoder[PictureTask | SoundTask]",
    body: bytes,
    time_s: float,
    base_bytes: int,
    answers: BinaryIO,
) -> None:
    """Run one task and write the answer."""
    task = decoder.decode(body)
    if isinstance(task, SoundTask):
        needed = SAMPLE_BYTES * HOP * task.window * task.max_windows
    else:
        needed = PIXEL_BYTES * task.max_pixels
    limit = base_bytes + ROOM_BYTES + 4 * len(body) + needed
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, time_s)  # its signal ends the process
    found = sound_of(task) if isinstance(task, SoundTask) else answer_of(task)
    answer = msgspec.msgpack.encode(found)
    signal.setitimer(signal.ITIMER_PROF, 0)
    answers.write(LENGTH.pack(len(answer)))
    answers.write(answer)
    answers.flush()


if __name__ == "__main__":
    main()
