"""A contract for import-linter: third parties are imported only where a table allows it.

Import-linter's own `forbidden` contract names what may *not* be imported, so a library nobody thought of would pass. This
one names what may: every import of anything outside the standard library and our packages must match a row
``importer -> third party``, where the importer is a module or a package with all below it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from importlinter import Contract, ContractCheck, fields, output

if TYPE_CHECKING:
    from grimp import ImportGraph


class ThirdPartyContract(Contract):
    """Direct imports of third parties, all of which must be in ``allowed``."""

    type_name = "third_party"

    allowed = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Every third-party import without a row is a breach."""
        rows = [tuple(part.strip() for part in row.split("->")) for row in self.allowed]
        breaches = [
            (importer, foreign)
            for foreign in sorted(self._foreign(graph))
            for importer in sorted(graph.find_modules_that_directly_import(foreign))
            if not any(_within(importer, place) and _within(foreign, name) for place, name in rows)
        ]
        if verbose:
            output.print(f"{len(rows)} rows, {len(breaches)} breaches")
        places = [
            (
                importer,
                foreign,
                [one["line_number"] for one in graph.get_import_details(importer=importer, imported=foreign)],
            )
            for importer, foreign in breaches
        ]
        return ContractCheck(kept=not breaches, metadata={"breaches": places})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Who imports what, on which lines, and what to do about it."""
        for importer, foreign, lines in check.metadata["breaches"]:
            output.print_error(f"{importer} imports {foreign} (l. {', '.join(map(str, lines))})", bold=False)
        output.print_error("Move the import to the module that owns this third party, or add a row to pyproject.toml.")

    def _foreign(self, graph: ImportGraph) -> set[str]:
        ours = tuple(self.session_options["root_packages"])
        known = {*ours, *sys.stdlib_module_names}
        return {module for module in graph.modules if module.partition(".")[0] not in known}


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
