"""What tests look for in figures."""


def texts(figure) -> str:
    found = [*figure.texts, *(text for ax in figure.axes for text in ax.texts)]
    return " | ".join(text.get_text() for text in found)
