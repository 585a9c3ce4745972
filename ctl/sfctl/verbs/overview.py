"""The daemon and its models: ``status``."""

from __future__ import annotations

from sfctl.render import Cell, Colour, clean, count, duration, paint, rate, share, table
from sfctl.verbs.verb import Context, Verb
from superfluidd.control.protocol import ModelView, NoParams, StatusResult

COLUMNS = (
    *("MODEL", "STATE", ">LANES", ">QUEUE", ">KV USED", ">PROMISED", ">WINDOW"),
    *(">DECODE/S", ">PREFILL/S", ">LAST STEP", ">THREADS", ">WORKER", ">RESPAWNS"),
)

STATE_COLOURS: dict[str, Colour] = {
    "ready": "green",
    "loading": "yellow",
    "recovering": "yellow",
    "failed": "red",
    "unloading": "yellow",
    "unloaded": "dim",
    "resting": "dim",
}


def status(context: Context) -> str:
    """The daemon, a row per model, and a line for whatever is wrong."""
    return context.show(
        context.client.call("status", NoParams(), StatusResult), lambda result: report(result, context.colour)
    )


def report(result: StatusResult, colour: bool) -> str:
    """``status`` as text."""
    state = paint("draining, takes no new requests", "yellow", colour) if result.draining else "serving"
    head = (
        f"superfluidd {clean(result.version)}, pid {result.pid}, up {duration(result.uptime)}, {state}\n"
        f"http    http://{clean(result.http)}\n"
        f"socket  {clean(result.socket)}\n"
    )
    notes = "".join(note for model in result.models for note in _notes(model, colour))
    return head + "\n" + table(COLUMNS, [_row(model) for model in result.models], colour) + (notes and "\n" + notes)


def _row(model: ModelView) -> list[Cell]:
    state = Cell("stalled", "red") if model.stalled else Cell(model.state, STATE_COLOURS[model.state])
    return [
        Cell(model.name, "bold"),
        state,
        Cell(share(model.lanes_busy, model.lanes)),
        Cell(count(model.queued)),
        Cell(share(model.cells_used, model.cells)),
        Cell(share(model.cells_promised, model.cells)),
        Cell(count(model.window)),
        Cell(rate(model.decode_rate)),
        Cell(rate(model.prefill_rate)),
        Cell(duration(model.silent_seconds), "red" if model.stalled else ""),
        Cell(count(model.threads)),
        Cell(model.worker_pid or "-"),
        Cell(count(model.respawns), "yellow" if model.respawns else ""),
    ]


def _notes(model: ModelView, colour: bool) -> list[str]:
    notes = []
    name = clean(model.name)
    if model.stalled:
        worker = f"worker {model.worker_pid}" if model.worker_pid else "its engine"
        look = f"; `ps -o pid,stat,pcpu,args -p {model.worker_pid}` shows it" if model.worker_pid else ""
        notes.append(
            paint(f"{name} is stalled: {worker} has been silent for {duration(model.silent_seconds)}", "red", colour)
            + f", in a tick of {duration(model.tick_seconds)}{look}\n"
        )
    if model.error:
        notes.append(f"{paint(f'{name} is {model.state}:', STATE_COLOURS[model.state], colour)} {clean(model.error)}\n")
    return notes


VERBS = (
    Verb(
        "status",
        "the daemon, its models and their engines",
        "Returns at once, also while an engine is busy, stalled or being replaced.",
        status,
    ),
)
