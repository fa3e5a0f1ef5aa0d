"""The session in a world that loses, repeats and reorders everything, and falls at any moment.

The world itself checks each command (`agent_world`); here are only the things that can happen.
"""

from uuid import UUID

import hypothesis.strategies as st
from agent_world import LEASE, Row, World
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fleetward.agent.events import Refused, Replied, SessionOpened

ANY = st.integers(min_value=0, max_value=20)


class Sessions(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.world = World()

    @rule(rounds=st.integers(1, 5), seconds=st.sampled_from([0.0, 3.0]), needs_upload=st.booleans())
    def all_goes_well_for_a_while(self, rounds, seconds, needs_upload):
        """Without stretches like this, trouble would never find anything that has come far."""
        for _ in range(rounds):
            self.world.now += seconds
            self.world.go_on(needs_upload=needs_upload)

    @precondition(lambda self: len(self.world.rows) < 4)
    @rule()
    def the_controller_assigns(self):
        id = UUID(int=len(self.world.rows) + 1)
        self.world.rows[id] = Row(id, lease_ends=self.world.now + LEASE)

    @precondition(lambda self: self.world.rows)
    @rule(which=ANY)
    def a_job_is_cancelled(self, which):
        row = list(self.world.rows.values())[which % len(self.world.rows)]
        row.desired = "stop"

    @precondition(lambda self: self.world.rows)
    @rule(often=st.integers(0, 2))
    def the_node_is_declared_dead(self, often):
        """Its work is given to others while it may still run here; the next reply lists none of it."""
        if often == 0:
            for row in self.world.rows.values():
                row.state, row.is_released = ("failed" if row.state != "succeeded" else row.state), True

    @precondition(lambda self: self.world.requests)
    @rule(which=ANY)
    def a_request_arrives(self, which):
        self.world.receive(which)

    @precondition(lambda self: self.world.replies)
    @rule(which=ANY, is_repeated=st.booleans(), falls_after=st.none() | st.integers(0, 6))
    def an_answer_arrives(self, which, is_repeated, falls_after):
        world = self.world
        index = which % len(world.replies)
        event = world.replies[index] if is_repeated else world.replies.pop(index)
        world.tell(event, falls_after=falls_after)

    @precondition(lambda self: self.world.requests)
    @rule(which=ANY)
    def a_request_is_lost(self, which):
        _, request = self.world.requests.pop(which % len(self.world.requests))
        self.world.replies.append(Refused(request.sequence, "unreachable", "no answer"))

    @precondition(lambda self: self.world.replies)
    @rule(which=ANY)
    def an_answer_is_lost(self, which):
        """Only what comes over the network can be; what this machine does is known here."""
        event = self.world.replies.pop(which % len(self.world.replies))
        match event:
            case Replied():
                event = Refused(event.reply.sequence, "unreachable", "no answer")
            case SessionOpened():
                event = Refused(0, "unreachable", "no answer")
            case _:
                pass
        self.world.replies.append(event)

    @precondition(lambda self: self.world.chores)
    @rule(which=ANY, needs_upload=st.booleans())
    def something_under_way_is_done(self, which, needs_upload):
        self.world.chore(which, needs_upload=needs_upload)

    @precondition(lambda self: any(process.phase == "running" for process in self.world.processes.values()))
    @rule(which=ANY, exit_code=st.sampled_from([0, 0, 3]))
    def a_command_ends(self, which, exit_code):
        running = [id for id, process in self.world.processes.items() if process.phase == "running"]
        self.world.end(running[which % len(running)], exit_code=exit_code)

    @rule(seconds=st.sampled_from([0.5, 5.0, 40.0, 120.0]))
    def time_passes(self, seconds):
        self.world.pass_time(seconds)
        self.world.expire()

    @rule(often=st.integers(0, 3))
    def the_agent_falls(self, often):
        if often == 0:
            self.world.restart()

    @rule(is_full=st.booleans())
    def the_disk_fills_or_empties(self, is_full):
        self.world.is_disk_full = is_full

    def teardown(self):
        """When the trouble is over, everything that was assigned comes to an end."""
        world = self.world
        world.is_disk_full = False
        for _ in range(200):
            if all(row.is_released for row in world.rows.values()):
                break
            for id in [id for id, process in world.processes.items() if process.phase == "running"]:
                world.end(id, exit_code=0)
            world.go_on(needs_upload=False)
            world.pass_time(2.0)
            world.expire()
        assert all(row.is_released for row in world.rows.values())


Sessions.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSessions = Sessions.TestCase
