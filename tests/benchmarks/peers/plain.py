"""A hand-written loop without checkpoints: what the others are compared with."""

from common import settings, train_with


def main() -> None:
    train_with(settings(), lambda _: lambda _: None)


if __name__ == "__main__":
    main()
