"""What a conductor shows of its pipeline: who does what, where micro-batches flow, which stage is the slowest."""

from __future__ import annotations

from typing import Any

from potluck.pipeline.book import RunRecord
from potluck.pipeline.judging import Judge
from potluck.pipeline.layout import Layout
from potluck.pipeline.roll import PeerState, Roll
from potluck.pipeline.staffing import Plan

MAX_SHOWN = 500


def overview(
    roll: Roll, record: RunRecord, judge: Judge, *, phase: str, waits: str, step_seconds: float, now: float
) -> dict[str, Any]:
    """Who does what now, and where micro-batches flow."""
    layout, plan = roll.layout, roll.plan
    flows = roll.flows.per_second(now, roll.peers)
    return {
        "step": record.step,
        "life": record.life,
        "loss": record.loss,
        "step_seconds": step_seconds,
        "phase": phase,
        "waits": waits,
        "first_blocks": list(record.starts),
        "target_first_blocks": list(plan.layout.starts) if plan is not None else [],
        "peers": {name: _shown(name, peer, plan) for name, peer in list(roll.peers.items())[:MAX_SHOWN]},
        "stages": layout.num_stages if layout is not None else 0,
        "rows": _stage_rows(roll, layout, plan) if layout is not None and plan is not None else [],
        "flows": [
            {"source": source, "target": target, "stage": stage, "per_second": round(rate, 3)}
            for (source, target, stage), rate in sorted(flows.items())[:MAX_SHOWN]
        ],
        "cut_step": record.cut_step,
        "losses": list(record.losses),
        "morphs": list(record.morphs),
        "moves": [{"peer": m.server, "from": m.source, "to": m.target, "reason": m.reason} for m in roll.staff.moves],
        "checks": {
            "rate": judge.rate,
            "made": judge.num_checks,
            "failed": judge.num_failed,
            "not_possible": judge.num_unchecked,
            "excluded": dict(record.excluded),
            "tolerances": [
                {"one": one, "other": other, "of": kind, "limit": limit}
                for one, other, kind, limit in judge.tolerances.table()
            ],
        },
    }


def _shown(name: str, peer: PeerState, plan: Plan | None) -> dict[str, Any]:
    return {
        "serves": list(plan.serves.get(name, ())) if plan is not None else [],
        "listens": list(plan.listens.get(name, ())) if plan is not None else [],
        "feeds": peer.offer.feeds,
        "saves": peer.offer.saves,
        "standing": sorted(peer.standing),
        "loading": sorted(peer.blocks - peer.standing),
        "rate": peer.offer.rate,
        "waiting": peer.offer.waiting,
        "why": plan.why.get(name, "") if plan is not None else "",
    }


def _stage_rows(roll: Roll, layout: Layout, plan: Plan) -> list[dict[str, Any]]:
    """Of each stage: its blocks, its servers, and how many samples per second they can compute together."""
    rows: list[dict[str, Any]] = []
    for stage, blocks in enumerate(layout.stages):
        is_planned = plan.layout == layout
        offers = {
            name: roll.peers[name].offer
            for name, stages in plan.serves.items()
            if is_planned and stage in stages and name in roll.peers
        }
        rates = [offer.rate / len(plan.serves[name]) for name, offer in offers.items()]
        rows.append(
            {
                "first_block": blocks.start,
                "last_block": blocks.stop - 1,
                "servers": list(offers),
                "listeners": [name for name, stages in plan.listens.items() if stage in stages],
                "samples_per_second": sum(rates) if rates and all(rates) else 0.0,
                "waiting": sum(offer.waiting for offer in offers.values()),
            }
        )
    slowest = min((row["samples_per_second"] for row in rows), default=0.0)
    for row in rows:  # nobody is, while one of them is not measured
        row["is_bottleneck"] = bool(slowest) and len(rows) > 1 and row["samples_per_second"] == slowest
    return rows
