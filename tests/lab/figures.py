"""What tests look for in figures."""


def words(figure) -> list[str]:
    """Every text in the figure."""
    found = [*(text for ax in figure.axes for text in ax.texts), *figure.texts]
    return [text.get_text() for text in found]


def texts(figure) -> str:
    return " | ".join(words(figure))
