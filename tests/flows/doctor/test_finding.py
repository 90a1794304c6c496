"""Running checks one after the other."""

from flows.doctor.run_file_checks import Checks, Finding


def test_exception_in_a_check_becomes_its_finding() -> None:
    reported: list[Finding] = []
    checks = Checks(reported.append)

    def crash() -> Finding:
        raise ZeroDivisionError("by zero")

    first = checks.run("first", crash)
    checks.run("second", crash, first)
    checks.run("third", lambda: Finding(check="third", verdict="pass", text="fine"))
    assert [(each.check, each.verdict) for each in reported] == [
        ("first", "fail"),
        ("second", "skipped"),
        ("third", "pass"),
    ]
    assert "ZeroDivisionError: by zero" in reported[0].text
    assert reported[1].text == "needs first, which did not pass"
    assert checks.failed
