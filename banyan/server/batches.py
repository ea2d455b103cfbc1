"""/v1/batches: a file of requests that run while the engine has free capacity.

The batches of one owner run one at a time, oldest first; owners share the engine. A status is on
disk before a client sees it, and answers are appended in synced groups. So a batch continues after
a crash.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from banyan.base.errors import BanyanError, CapacityError, ConfigError, RequestError
from banyan.base.log import logger
from banyan.server.batch_lines import (
    RETRY_S,
    BatchLine,
    ServerEnding,
    endpoints,
    labels_header,
    read_lines,
    run_lines,
)
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.files import PURPOSE, listed, page
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState
from banyan.server.store.batches import AnswerLog, BatchStore, Fault, StoredBatch
from banyan.server.store.files import STORAGE_FULL
from banyan.server.store.folder import owner_of
from banyan.server.store.storage import Storage

log = logger(__name__)

_PAGE = 20
_WINDOW = "24h"
_MAX_METADATA = 16
DISK_RETRY_S = 10.0
"""How often a batch is tried again whose state or answers cannot be written."""
_PAUSED = "paused"


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a new batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


async def batches(exchange: HttpExchange, state: ServerState) -> None:
    """List the batches, or create one."""
    if exchange.request.method == "POST":
        await _create(exchange, state)
        return
    found = (await state.storage.ready_if_used()).batches.all(owner_of(exchange.context.tenant))
    shown, has_more = page(found, exchange.request.query, lambda b: b.id, _PAGE)
    await exchange.json(listed([_shown(b, state.storage) for b in shown], has_more))


async def batch(exchange: HttpExchange, state: ServerState) -> None:
    """Show or cancel one batch."""
    storage = await state.storage.ready_if_used()
    id, _, verb = exchange.request.tail.partition("/")
    found = storage.batches.find(id, owner_of(exchange.context.tenant))
    if exchange.request.method == "POST":
        if verb != "cancel":
            raise RequestError("POST goes to /v1/batches/ID/cancel", status=404, code="not_found")
        found = await _cancel(state, found)
    elif verb:
        raise RequestError("GET goes to /v1/batches/ID", status=404, code="not_found")
    await exchange.json(_shown(found, storage))


async def resume_batches(state: ServerState) -> None:
    """Continue the unfinished batches of an earlier process."""
    try:
        store = (await state.storage.ready_if_used()).batches
    except RequestError as error:
        log.warning("batches cannot continue: %s", error)
        return
    for other in store.batches.values():
        if not other.is_over and not other.is_for(state.served_name):
            log.warning("batch waits for its model id=%s model=%s", other.id, other.model)
    for owner in {batch.owner: None for batch in store.batches.values()}:
        if store.next(state.served_name, owner) is not None:
            _start(state, store, owner)


async def _create(exchange: HttpExchange, state: ServerState) -> None:
    state.admit()
    raw = await exchange.request.json_object()
    for name in raw.keys() - set(BatchRequest.__struct_fields__):
        why = "not used; nothing expires here"
        exchange.context.warn_or_refuse(name, why)
    asked = typed(raw, BatchRequest)
    storage, owner = await state.storage.ready(), owner_of(exchange.context.tenant)
    _check(asked, storage, owner)
    await storage.batches.make_room(owner)
    made = StoredBatch(
        id=storage.batches.fresh_id(),
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        output_file_id=storage.files.fresh_id(),
        error_file_id=storage.files.fresh_id(),
        completion_window=asked.completion_window,
        created_at=int(time.time()),
        metadata=asked.metadata,
        model=state.served_name,
        owner=owner,
        labels=exchange.request.header(labels_header(state)) if state.labels is not None else "",
    )
    await storage.batches.save(made)
    _start(state, storage.batches, owner)
    await exchange.json(_shown(made, storage))


def _check(asked: BatchRequest, storage: Storage, owner: str) -> None:
    if asked.endpoint not in endpoints():
        raise RequestError(
            f"endpoint must be one of {', '.join(endpoints())}, got {asked.endpoint[:60]!r}",
            param="endpoint",
        )
    if asked.completion_window != _WINDOW:
        raise RequestError(f"completion_window must be {_WINDOW!r}", param="completion_window")
    if storage.files.find(asked.input_file_id, owner).purpose != PURPOSE:
        raise RequestError(
            f"the input file must have been uploaded for {PURPOSE!r}", param="input_file_id"
        )
    metadata = asked.metadata or {}
    if len(metadata) > _MAX_METADATA or any(
        len(k) > 64 or len(v) > 512 for k, v in metadata.items()
    ):
        raise RequestError(
            f"metadata has at most {_MAX_METADATA} keys of 64 and values of 512 characters",
            param="metadata",
        )


async def _cancel(state: ServerState, found: StoredBatch) -> StoredBatch:
    if found.is_over or found.status == "finalizing":
        raise RequestError(
            f"the batch is {found.status}; only a batch that runs can be cancelled",
            status=409,
            code="batch_over",
        )
    store = state.storage.batches
    if found.status != "cancelling":
        found = _entered(found, "cancelling")
        await store.save(found)
    store.cancelled.set()
    _start(state, store, found.owner)
    return found


def _start(state: ServerState, store: BatchStore, owner: str) -> None:
    """Start the task that runs the batches of an owner, if it does not run."""
    if owner not in store.work or store.work[owner].done():
        store.work[owner] = asyncio.create_task(_work(state, store, owner))


async def _work(state: ServerState, store: BatchStore, owner: str) -> None:
    """Run the unfinished batches of an owner, oldest first."""
    try:
        while (found := store.next(state.served_name, owner)) is not None:
            log.info("batch started id=%s status=%s", found.id, found.status)
            try:
                await _run(state, found.id)
            except ServerEnding:
                if not await _has_engine(state):
                    raise
            except (CapacityError, RequestError) as error:
                await _pause(store, found.id, error)
            else:
                log.info("batch ended id=%s status=%s", found.id, store.batches[found.id].status)
    except ServerEnding:
        log.info("batches continue at the next start")
    except BanyanError as error:
        log.error("batches stopped: %s", error)
    except Exception:
        log.exception("batches stopped")


async def _pause(store: BatchStore, id: str, error: BanyanError) -> None:
    """Show a disk that takes nothing to the owner of the batch, and wait before the next try."""
    why = f"{error.text}; it is tried again every {DISK_RETRY_S:.0f} s"
    log.error("batch paused id=%s: %s", id, why)
    paused = [*store.batches[id].faults, Fault(_PAUSED, why)]
    store.batches[id] = msgspec.structs.replace(store.batches[id], faults=paused)
    await asyncio.sleep(DISK_RETRY_S)


async def _has_engine(state: ServerState) -> bool:
    """Wait until a lost engine is replaced; False if it will not be."""
    while not (state.dead or state.draining):
        if not state.not_ready_reason():
            return True
        await asyncio.sleep(RETRY_S)
    return False


async def _run(state: ServerState, id: str) -> None:
    """Run one batch to its end from its current state."""
    storage, store = state.storage, state.storage.batches
    known = [fault for fault in store.batches[id].faults if fault.code != _PAUSED]
    store.batches[id] = msgspec.structs.replace(store.batches[id], faults=known)
    lines, faults = await _read(storage, store.batches[id])
    if faults:
        await store.save(
            msgspec.structs.replace(_entered(store.batches[id], "failed"), faults=faults)
        )
        return
    if store.batches[id].status == "validating":
        started = _entered(store.batches[id], "in_progress")
        await store.save(msgspec.structs.replace(started, total=len(lines)))
    found = store.batches[id]
    files = storage.files
    answers = AnswerLog(
        files.path(found.output_file_id),
        files.path(found.error_file_id),
        partial(files.reservations.add, id, owner=found.owner),
    )

    def on_progress() -> None:
        store.batches[id] = msgspec.structs.replace(
            store.batches[id], succeeded=answers.num_succeeded, failed=answers.num_failed
        )

    try:
        await asyncio.to_thread(answers.recover)
        files.reservations.set(id, answers.num_found, found.owner)
        on_progress()
        if found.status == "in_progress":
            work = run_lines(
                state, lines, answers, on_progress, deaths=found.deaths, labels=found.labels
            )
            await _until_cancelled(store, id, asyncio.create_task(work))
    except ServerEnding as ending:
        if ending.running:
            await store.save(_with_deaths(store.batches[id], ending.running))
        raise
    except RequestError as error:
        if error.code != STORAGE_FULL:
            raise
        # This batch ends with the answers so far; the next one runs.
        fault = Fault(error.code, str(error))
        store.batches[id] = msgspec.structs.replace(store.batches[id], faults=[fault])
    except ConfigError as error:
        fault = Fault("output_damaged", str(error))
        broken = msgspec.structs.replace(_entered(store.batches[id], "failed"), faults=[fault])
        await store.save(broken)
        return
    finally:
        answers.close()
    await _finish(storage, id)
    files.reservations.end(id)


async def _read(storage: Storage, batch: StoredBatch) -> tuple[list[BatchLine], list[Fault]]:
    try:
        content = await storage.files.content(batch.input_file_id)
    except (RequestError, OSError) as error:
        return [], [Fault("input_file_missing", f"the input file cannot be read: {error}")]
    tenant = bytes.fromhex(batch.owner)
    return await asyncio.to_thread(read_lines, content, batch.endpoint, tenant)


async def _until_cancelled(store: BatchStore, id: str, work: "asyncio.Task[None]") -> None:
    """Wait for `work`; cancel it if the batch is cancelled."""
    try:
        while not work.done() and store.batches[id].status != "cancelling":
            store.cancelled.clear()
            notice = asyncio.create_task(store.cancelled.wait())
            try:
                await asyncio.wait((work, notice), return_when=asyncio.FIRST_COMPLETED)
            finally:
                notice.cancel()
        if work.done():
            work.result()
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError, BanyanError, ServerEnding):
            await work


async def _finish(storage: Storage, id: str) -> None:
    """Publish the answers and close the batch. May be repeated after a crash."""
    store, files = storage.batches, storage.files
    if store.batches[id].status == "in_progress":
        await store.save(_entered(store.batches[id], "finalizing"))
    found = store.batches[id]
    for file_id, count, kind in (
        (found.output_file_id, found.succeeded, "output"),
        (found.error_file_id, found.failed, "error"),
    ):
        if count:
            await files.publish(file_id, f"{id}_{kind}.jsonl", "batch_output", found.owner)
        else:
            await store.folder.discard(file_id)
    ended = "cancelled" if found.status == "cancelling" else "completed"
    if found.faults:
        ended = "failed"
    await store.save(_entered(store.batches[id], ended))


def _with_deaths(batch: StoredBatch, running: Sequence[str]) -> StoredBatch:
    """The batch with one more death for each running line."""
    more = {custom_id: batch.deaths.get(custom_id, 0) + 1 for custom_id in running}
    log.warning("the engine died on a batch id=%s lines=%d", batch.id, len(more))
    return msgspec.structs.replace(batch, deaths={**batch.deaths, **more})


def _entered(batch: StoredBatch, status: str) -> StoredBatch:
    times = {**batch.times, status: int(time.time())}
    return msgspec.structs.replace(batch, status=status, times=times)


def _shown(batch: StoredBatch, storage: Storage) -> Json:
    faults = [
        {"code": f.code, "message": f.message, "line": f.line or None, "param": f.param or None}
        for f in batch.faults
    ]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id if batch.is_over and batch.succeeded else None,
        "error_file_id": batch.error_file_id if batch.is_over and batch.failed else None,
        "created_at": batch.created_at,
        "expires_at": None,
        "expired_at": None,
        **_times(batch.times),
        "request_counts": {
            "total": batch.total,
            "completed": batch.succeeded,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
        "model": batch.model,
    }


def _times(times: Mapping[str, int]) -> Json:
    names = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled")
    return {f"{name}_at": times.get(name) for name in names}
