"""Memory for large copies is kept, grows, and is never lent twice."""

from baton.tasks.foundation.state.host_memory import PageBuffer


def test_memory_is_kept_and_grows() -> None:
    buffer = PageBuffer()
    first = buffer.borrow(100)
    first[:] = b"x" * 100
    buffer.give_back(first)
    again = buffer.borrow(50)
    assert bytes(again) == b"x" * 50
    buffer.give_back(again)
    large = buffer.borrow(5 << 20)
    assert len(large) == 5 << 20
    assert bytes(large[:100]) == bytes(100)


def test_lent_memory_is_not_lent_again() -> None:
    buffer = PageBuffer()
    first, second = buffer.borrow(10), buffer.borrow(10)
    first[:], second[:] = b"1" * 10, b"2" * 10
    assert (bytes(first), bytes(second)) == (b"1" * 10, b"2" * 10)
    buffer.give_back(first)  # late: the second is still lent
    third = buffer.borrow(10)
    third[:] = b"3" * 10
    assert bytes(second) == b"2" * 10


def test_reserved_memory_is_the_one_that_is_lent() -> None:
    buffer = PageBuffer()
    thread = buffer.reserve(20 << 20)
    assert buffer.size == 20 << 20
    lent = buffer.borrow((20 << 20) - 5)
    lent[:] = b"x" * len(lent)
    assert thread is not None
    thread.join()
    assert bytes(lent) == b"x" * len(lent)  # getting it ready changes no content
    assert buffer.reserve(100) is None
    assert buffer.size == 20 << 20
