"""Single calls with the shapes of published models: `python -m bench calls`."""
