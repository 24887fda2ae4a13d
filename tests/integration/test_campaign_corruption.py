def test_every_damage_is_noticed() -> None:
    """Of the first trials of the campaign `corruption` every damage is told, and everything intact is not."""
    from tools.campaign_corruption import DAMAGES, trial

    kinds = set()
    for seed in range(100):
        kinds |= trial(seed).keys()
    assert kinds == {"caught", *DAMAGES, *(f"slot_{kind}" for kind in ("header", "digests", "blob", "table", "data"))}
