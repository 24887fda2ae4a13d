"""Who asks, and what they may: tokens, and rules as RBAC writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dlrover_backends.fake_k8s.answers import Refused, status
from dlrover_backends.fake_k8s.kinds import Kind
from dlrover_backends.fake_k8s.store import Store

Object = dict[str, Any]

_RBAC = "rbac.authorization.k8s.io"


@dataclass(frozen=True)
class User:
    """Somebody with a token.

    Attributes:
        name: as messages name them, `system:serviceaccount:train:dlrover`.
        groups: groups for role bindings; `system:masters` may do everything.
        rules: rules beside those of role bindings, as in a Role, each with an optional `namespaces`.
    """

    name: str
    groups: tuple[str, ...] = ()
    rules: tuple[Object, ...] = field(default=(), hash=False)


ADMIN = User("kubernetes-admin", ("system:masters", "system:authenticated"))
ANONYMOUS = User("system:anonymous", ("system:unauthenticated",))


def account(namespace: str, name: str) -> User:
    """The user that a service account is."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated")
    return User(f"system:serviceaccount:{namespace}:{name}", groups)


class Rights:
    """Tokens and rules of one server."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.tokens: dict[str, User] = {}

    def user(self, authorization: str | None) -> User:
        """Who sent an Authorization header; nobody without one.

        Raises:
            Refused: 401 for a token that nobody has.
        """
        if not authorization:
            return ANONYMOUS
        user = self.tokens.get(authorization.removeprefix("Bearer ").strip())
        if user is None:
            raise Refused(401, status(401, "Unauthorized"))
        return user

    def may(self, user: User, verb: str, kind: Kind, namespace: str, *, sub: str = "", name: str = "") -> bool:
        """Whether a user may do that."""
        if "system:masters" in user.groups:
            return True
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        return any(
            _allows(rule, verb, kind.group, resource, name)
            for where, rule in self._rules(user)
            if where is None or where == namespace
        )

    def demand(self, user: User, verb: str, kind: Kind, namespace: str, *, sub: str = "", name: str = "") -> None:
        """Refuse what a user may not do.

        Raises:
            Refused: 403, in the words of the real server.
        """
        if self.may(user, verb, kind, namespace, sub=sub, name=name):
            return
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        subject = f'{kind.qualified} "{name}"' if name else kind.qualified
        where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
        words = (
            f'{subject} is forbidden: User "{user.name}" cannot {verb} resource "{resource}" '
            f'in API group "{kind.group}"{where}'
        )
        details: Object = {"name": name} if name else {}
        if kind.group:
            details["group"] = kind.group
        details["kind"] = kind.plural
        raise Refused(403, status(403, words, details=details), {"X-Content-Type-Options": "nosniff"})

    def _rules(self, user: User) -> list[tuple[str | None, Object]]:
        found: list[tuple[str | None, Object]] = []
        for rule in user.rules:
            found += [(where, rule) for where in rule.get("namespaces") or [None]]
        for binding in self._store.shelf((_RBAC, "rolebindings")).objects.values():
            if any(_subject(one, user, binding.obj) for one in binding.obj.get("subjects") or []):
                where = binding.obj["metadata"]["namespace"]
                found += [(where, rule) for rule in self._role(binding.obj["roleRef"], where)]
        for binding in self._store.shelf((_RBAC, "clusterrolebindings")).objects.values():
            if any(_subject(one, user, binding.obj) for one in binding.obj.get("subjects") or []):
                found += [(None, rule) for rule in self._role(binding.obj["roleRef"], "")]
        return found

    def _role(self, ref: Object, namespace: str) -> list[Object]:
        if ref["kind"] == "Role":
            role = self._store.get((_RBAC, "roles"), (namespace, ref["name"]))
        else:
            role = self._store.get((_RBAC, "clusterroles"), ("", ref["name"]))
        return (role.obj.get("rules") or []) if role else []


def _subject(one: Object, user: User, binding: Object) -> bool:
    if one["kind"] == "ServiceAccount":
        namespace = one.get("namespace") or binding["metadata"].get("namespace", "")
        return user.name == f"system:serviceaccount:{namespace}:{one['name']}"
    if one["kind"] == "Group":
        return one["name"] in user.groups
    return bool(one["name"] == user.name)


def _allows(rule: Object, verb: str, group: str, resource: str, name: str) -> bool:
    names = rule.get("resourceNames")
    return (
        _has(rule.get("verbs"), verb)
        and _has(rule.get("apiGroups"), group)
        and (
            _has(rule.get("resources"), resource) or f"*/{resource.partition('/')[2]}" in (rule.get("resources") or [])
        )
        and (not names or name in names)
    )


def _has(listed: list[str] | None, one: str) -> bool:
    return listed is not None and (one in listed or "*" in listed)
