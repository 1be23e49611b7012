"""What everything registered must keep: these tests enumerate the registries, so that a new kernel, rule,
similarity, solver, preset or implementation is held to them without an edit here."""
