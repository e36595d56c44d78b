"""The channel between the supervisor and a process: messages sent before a death are received."""

import pytest
from sidestream.runtime.processes.channel import Channel, ChannelClosed


@pytest.mark.parametrize("unread", [False, True])
def test_messages_sent_before_a_death_are_received(unread):
    ours, theirs = Channel.pair()
    with theirs:
        child = Channel(theirs)
        if unread:  # then recv raises instead of returning the end
            ours.send({"order": "drain"})
        child.send({"event": "answered"})
        child.close()
    assert ours.receive() == [{"event": "answered"}]
    with pytest.raises(ChannelClosed):
        ours.receive()
    ours.close()
