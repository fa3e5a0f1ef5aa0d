"""What may happen next in a world, and how often.

Owns the acts of the first phase with their weights, and the peaceful round of the second. Refuses to know
what must hold.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal
from uuid import UUID

from fleetward.agent.events import StopRequested
from fleetward.controller.services.sync import SyncCall
from fleetward.domain.errors import IllegalMove
from fleetward.sim import removal
from fleetward.sim.agent import SimAgent, SimNode
from fleetward.sim.checks import Violated
from fleetward.sim.controller import RHYTHM
from fleetward.sim.network import Call
from fleetward.sim.submissions import Submission, some_job
from fleetward.wire.handshake import JoinString
from fleetward.wire.messages import HeldAssignment, JobSubmitted, SyncRequest

if TYPE_CHECKING:
    from fleetward.sim.controller import SimController
    from fleetward.sim.world import World

Act = Callable[["World"], None]
Question = Callable[["World"], bool]
Kind = Literal["calm", "network", "agents", "controllers", "operator"]

JOBS_MAX: Final = 6
MACHINES_MAX: Final = 5
ROUND_SECONDS_MIN: Final = 0.8
ROUND_SECONDS_MAX: Final = 8.0


def choose(world: "World") -> tuple[str, Act]:
    """Throw the dice for the next act, among those for which there is something to do."""
    possible = [
        (name, act, weight * getattr(world.weather, kind))
        for name, act, weight, kind, is_possible in ACTS
        if is_possible(world)
    ]
    name, act, _ = world.rng.choices(possible, [weight for _, _, weight in possible])[0]
    return name, act


# Time and messages


def _time_passes(world: "World") -> None:
    """Until the next thing is due, or for any time at all."""
    due = [seconds for node in world.nodes if (seconds := node.seconds_left()) is not None]
    if due and world.chance(0.7):
        seconds = min(due) + world.within(0.0, 1.0)
    else:
        low, high = world.rng.choices([(0.05, 2.0), (2.0, 15.0), (15.0, 60.0), (60.0, 150.0)], [60, 28, 9, 3])[0]
        seconds = world.within(low, high)
    world.say(f"{seconds:.1f} s pass")
    world.pass_time(seconds)


def _calls_arrive(world: "World") -> None:
    arriving: list[Call] = []
    for call in world.network.arrived(world.now):
        if world.chance(0.3):
            continue
        if world.chance(0.1 * world.weather.network):
            call.arrives_at = world.arrival(is_late=True)
            world.count("a call arrives again")
        else:
            world.network.calls.remove(call)
        if world.chance(0.06 * world.weather.network) or world.cut_off.get(call.sender, world.now) > world.now:
            world.say(f"{call.sender} {call.what} is lost")
            continue
        arriving.append(call)
    while arriving:
        count = world.rng.randrange(1, len(arriving) + 1)
        world.deliver(arriving[:count])
        arriving = arriving[count:]


def _replies_arrive(world: "World") -> None:
    world.network.forget_closed()
    for reply in list(world.network.replies):
        if world.chance(0.3) or reply not in world.network.replies:
            continue
        if not world.chance(0.05 * world.weather.network):
            world.network.replies.remove(reply)
        if world.chance(0.06 * world.weather.network):
            world.say(f"the reply to {reply.call.sender} {reply.call.what} is lost")
        elif not reply.call.is_closed:
            _hand_over(reply.call, reply.outcome)


def _held_calls_end(world: "World") -> None:
    world.let_go([held for held in world.network.held if not world.chance(0.5)])


def _hand_over(call: Call, outcome: object) -> None:
    # A sync's reply may come twice, and a session must bear that; other calls end with their answer.
    call.is_closed |= call.sync is None
    call.answered(outcome)


def _a_node_is_cut_off(world: "World") -> None:
    node = world.pick(world.nodes)
    seconds = world.within(10.0, 200.0)
    world.cut_off[node.name] = world.now + timedelta(seconds=seconds)
    world.say(f"{node.name} is cut off for {seconds:.0f} s")


# Nodes


def _agents(world: "World") -> list[SimAgent]:
    return [node.agent for node in world.nodes if node.agent is not None]


def _agents_work(world: "World") -> None:
    for agent in _agents(world):
        if not world.chance(0.3) and not agent.is_over:
            agent.work()


def _an_agent_starts(world: "World") -> None:
    for node in _startable(world):
        if not world.chance(0.4):
            world.say(f"{node.name}: an agent starts")
            node.start_agent()


def _startable(world: "World") -> list[SimNode]:
    return [node for node in world.nodes if node.agent is None and node.node_id is not None and not node.is_removed]


def _an_agent_dies(world: "World") -> None:
    agents = _agents(world)
    if agents:
        node = world.pick(agents).node
        world.say(f"{node.name}: the agent dies")
        node.end_agent()


def _an_agent_is_asked_to_leave(world: "World") -> None:
    agents = _agents(world)
    if agents:
        agent, at_once = world.pick(agents), world.chance(0.5)
        world.say(f"{agent.node.name}: the agent is asked to leave{' at once' if at_once else ''}")
        agent.feed(StopRequested(at_once=at_once))


def _a_node_is_confused(world: "World") -> None:
    """A sync tells of attempts under fences that are not theirs; it must change nothing of them."""
    agents = [agent for agent in _agents(world) if agent.credential is not None and agent.machine.disk.journal.held]
    controller = _any_controller(world)
    if controller is None or not agents:
        return
    agent = world.pick(agents)
    held = [
        HeldAssignment(id=entry.id, fence=entry.fence - 1, state="failed", released=True, error="confused")
        for entry in agent.machine.disk.journal.held
    ]
    agent.said += 1
    assert agent.credential is not None, "only such agents were picked"
    call = SyncCall(agent.credential, SyncRequest(sequence=agent.said, held=held))
    world.say(f"{controller.name} hears {agent.node.name} speak of wrong fences")
    world.count("a node is confused")
    with world.alone():
        # What a call under way has changed by now is none of this one's doing.
        world.check()
        before = world.checks.standing.assignments
        world.serve(controller, lambda: controller.sync([call]))
        world.check()
    now = world.checks.standing.assignments
    for id in (entry.id for entry in held):
        if before.get(id) != now.get(id):
            detail = f"it was {before.get(id)} and is {now.get(id)}"
            raise Violated(4, "a report under another fence changes nothing", f"assignment {id}", detail)


def _a_machine_reboots(world: "World") -> None:
    node = world.pick(world.nodes)
    loses = world.chance(0.3)
    world.say(f"{node.name} reboots{' and loses its attempts' if loses else ''}")
    world.count("a machine reboots")
    node.end_agent()
    node.machine.reboot(loses_attempts=loses)


# Pairing


def _machines_pair(world: "World") -> None:
    for node in world.nodes:
        if node.node_id is None and node.join is None:
            node.join = _code(world)
            if node.join is not None and world.chance(0.2):
                _a_stranger_tries(world, node.join)
        node.ask_to_pair()


def _code(world: "World") -> JoinString | None:
    controller = _any_controller(world)
    if controller is None or world.operator is None:
        return None
    by = world.operator
    made = world.serve(controller, lambda: controller.make_code(by))
    return made if isinstance(made, JoinString) else None


def _a_stranger_tries(world: "World", join: JoinString) -> None:
    """A second machine has seen the code; its calls race with the first one's."""
    stranger = world.add_machine()
    world.nodes.remove(stranger)
    world.strangers.append(stranger)
    stranger.join = join
    world.say(f"{stranger.name} has seen the code of another")
    world.count("a stranger tries a code")
    stranger.ask_to_pair()


# Controllers


def _any_controller(world: "World") -> "SimController | None":
    up = [controller for controller in world.controllers if controller.is_up]
    return world.pick(up) if up else None


def _a_controller_works(world: "World") -> None:
    controller = _any_controller(world)
    if controller is None:
        return
    now = world.checks.standing
    is_waiting = any(job.status in {"queued", "running"} for job in now.jobs.values())
    is_unverified = any(held.state == "succeeded" and held.open for held in now.assignments.values())
    is_overdue = any(
        held.open and held.lease is not None and held.lease + RHYTHM.grace < world.now
        for held in now.assignments.values()
    )
    weights = {
        "assign": 8.0 if is_waiting else 0.5,
        "verify": 10.0 if is_unverified else 0.5,
        "expire": 8.0 if is_overdue else 0.5,
        "mark_silent": 1.0,
        "release_due": 3.0 if is_waiting else 0.5,
        "fail_overdue": 0.5,
        "beat": 1.0,
    }
    name = world.rng.choices(list(weights), list(weights.values()))[0]
    _duty(world, controller, name)


def _duty(world: "World", controller: "SimController", name: str) -> None:
    outcome = world.serve(controller, controller.duties[name])
    if outcome:
        world.say(f"{controller.name}: {name} {outcome if isinstance(outcome, int) else type(outcome).__name__}")


def _up(world: "World") -> int:
    return sum(controller.is_up for controller in world.controllers)


def _a_controller_dies(world: "World") -> None:
    controller = _any_controller(world)
    if controller is not None:
        world.say(f"{controller.name} dies")
        controller.crash()


def _controllers_start(world: "World") -> None:
    for controller in world.controllers:
        if not controller.is_up:
            world.say(f"{controller.name} starts")
            controller.boot()
            world.serve(controller, controller.start)


def _bytes_rot(world: "World") -> None:
    """A stored file is not what it was."""
    stored = sorted(path for path in world.blob_folder.rglob("*") if path.is_file() and "uploads" not in path.parts)
    if not stored:
        return
    path = world.pick(stored)
    content = bytearray(path.read_bytes())
    content[world.rng.randrange(len(content))] ^= 0x20
    path.write_bytes(content)
    digest = path.name if path.parent.name == "packs" else path.parent.name + path.name
    world.spoilt[digest] = world.step
    world.say(f"the stored {path.parent.name}/{path.name[:8]} rots")
    world.count("bytes rot")


# The operator


def _has_more_to_submit(world: "World") -> bool:
    return len(world.submissions) < JOBS_MAX or any(one.job_id is None for one in world.submissions)


def _the_operator_submits(world: "World") -> None:
    waiting = [one for one in world.submissions if one.job_id is None]
    if len(world.submissions) < JOBS_MAX and (not waiting or world.chance(0.5)):
        waiting.append(Submission(some_job(world.rng), f"key-{len(world.submissions)}"))
        world.submissions.append(waiting[-1])
    for submission in waiting:
        _submit(world, submission)


def _submit(world: "World", submission: Submission) -> None:
    controller, by = _any_controller(world), world.operator
    if controller is None or by is None:
        return
    made = world.serve(controller, lambda: controller.submit(submission.spec, by=by, key=submission.key))
    if not isinstance(made, JobSubmitted):
        return
    if submission.job_id not in {None, made.id}:
        raise Violated(12, "the same key gets the same answer", submission.key, f"{submission.job_id}, then {made.id}")
    spec = submission.spec
    submission.job_id = made.id
    kind = " ".join(f"{key[4:].lower()} {value}" for key, value in spec.env.items())
    world.say(f"{controller.name}: job {world.label(made.id)}, {spec.quorum} of {spec.replicas}, {kind}")


def _the_operator_repeats(world: "World") -> None:
    """The answer to a submission was lost on its way to the operator, who says it again."""
    if world.submissions:
        _submit(world, world.pick(world.submissions))


def _the_operator_cancels(world: "World") -> None:
    controller, by = _any_controller(world), world.operator
    submitted = [one.job_id for one in world.submissions if one.job_id is not None]
    if controller is None or by is None or not submitted:
        return
    job_id = world.pick(submitted)
    world.say(f"{controller.name}: the operator cancels {world.label(job_id)}")
    world.serve(controller, lambda: controller.cancel(job_id, by=by))


def _the_operator_removes(world: "World") -> None:
    """A node with an open assignment must be refused by the database; an empty one goes for good."""
    controller = _any_controller(world)
    members = [node for node in world.nodes if node.node_id is not None and not node.is_removed]
    if controller is None or not members:
        return
    node = world.pick(members)
    node_id = node.node_id
    assert node_id is not None, "a member has an id"
    may_go = len(world.nodes) + len(world.strangers) < MACHINES_MAX and world.chance(0.5)
    is_open = any(held.open and held.node == node_id for held in world.checks.standing.assignments.values())
    if not (is_open or may_go):
        return
    world.say(f"{controller.name}: the operator removes {node.name}")
    outcome = world.serve(controller, lambda: _remove(controller, node_id))
    if outcome is True:
        world.count("a node is removed")
        world.add_machine()


def _remove(controller: "SimController", node_id: UUID) -> bool:
    try:
        return removal.remove(controller.database, node_id)
    except IllegalMove:
        return False


def _always(_: "World") -> bool:
    return True


def _has_agents(world: "World") -> bool:
    return any(node.agent is not None for node in world.nodes)


# How often each happens, by the kind of weather that changes it.
ACTS: Final[Sequence[tuple[str, Act, float, Kind, Question]]] = (
    ("time passes", _time_passes, 7, "calm", _always),
    ("calls arrive", _calls_arrive, 22, "calm", lambda world: bool(world.network.arrived(world.now))),
    ("replies arrive", _replies_arrive, 22, "calm", lambda world: bool(world.network.replies)),
    ("held calls end", _held_calls_end, 6, "calm", lambda world: bool(world.network.held)),
    ("agents work", _agents_work, 22, "calm", lambda world: any(agent.is_due for agent in _agents(world))),
    ("a controller works", _a_controller_works, 11, "calm", lambda world: _up(world) > 0),
    ("machines pair", _machines_pair, 8, "calm", lambda world: any(node.wants_to_pair for node in world.nodes)),
    ("an agent starts", _an_agent_starts, 16, "calm", lambda world: bool(_startable(world))),
    ("controllers start", _controllers_start, 10, "calm", lambda world: _up(world) < len(world.controllers)),
    ("the operator submits", _the_operator_submits, 6, "calm", _has_more_to_submit),
    ("the operator repeats", _the_operator_repeats, 0.3, "calm", _always),
    ("the operator cancels", _the_operator_cancels, 0.6, "operator", _always),
    ("the operator removes", _the_operator_removes, 0.6, "operator", _always),
    ("a node is cut off", _a_node_is_cut_off, 0.5, "network", _always),
    ("an agent dies", _an_agent_dies, 1, "agents", _has_agents),
    ("an agent is asked to leave", _an_agent_is_asked_to_leave, 0.3, "agents", _has_agents),
    ("a machine reboots", _a_machine_reboots, 0.4, "agents", _always),
    ("a node is confused", _a_node_is_confused, 0.5, "agents", _has_agents),
    ("a controller dies", _a_controller_dies, 0.6, "controllers", lambda world: _up(world) > 0),
    ("bytes rot", _bytes_rot, 0.5, "controllers", _always),
)


# The second phase


def one_round(world: "World") -> None:
    """Without faults: time passes until something is due, everyone works, everything that is sent arrives."""
    due = [seconds for node in world.nodes if (seconds := node.seconds_left()) is not None]
    world.pass_time(min(max(ROUND_SECONDS_MIN, min(due, default=0.0)), ROUND_SECONDS_MAX))
    _controllers_start(world)
    _machines_pair(world)
    for node in _startable(world):
        node.start_agent()
    for agent in _agents(world):
        agent.work()
    for number, name in enumerate(world.controllers[0].duties):
        if name in {"assign", "verify"} or world.step % 3 == 0:
            _duty(world, world.controllers[(world.step + number) % 2], name)
    if any(one.job_id is None for one in world.submissions):
        _the_operator_submits(world)
    _held_calls_end(world)
    _everything_arrives(world)


def _everything_arrives(world: "World") -> None:
    calls, world.network.calls = world.network.calls, []
    if calls:
        world.deliver(calls)
    replies, world.network.replies = world.network.replies, []
    for reply in replies:
        if not reply.call.is_closed:
            _hand_over(reply.call, reply.outcome)
