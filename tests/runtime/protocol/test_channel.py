"""The line between the supervisor and a process: what was said before a death is heard."""

import pytest
from sidestream.runtime.processes.channel import Channel, ChannelClosed


@pytest.mark.parametrize("unread", [False, True])
def test_the_last_words_of_a_process_are_heard(unread):
    ours, theirs = Channel.pair()
    with theirs:
        child = Channel(theirs)
        if unread:  # then the system reports the death as an error
            ours.send({"order": "drain"})
        child.send({"event": "answered"})
        child.close()
    assert ours.receive() == [{"event": "answered"}]
    with pytest.raises(ChannelClosed):
        ours.receive()
    ours.close()
