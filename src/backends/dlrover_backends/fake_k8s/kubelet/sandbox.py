"""A pod's folder and its containers' environment: variables, downward fields, and volumes as folders.

Processes see the host's file system, so nothing can be mounted: where a command or a variable names a mount path, the
path of the volume's folder is put in its place. In the same way names of services become their addresses.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Object = dict[str, Any]
Look = Callable[[str, str, str], Object | None]  # kind, namespace, name -> object

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH")
MARK = "PROCESS_KUBELET_POD"  # in the environment of all that a pod starts


class Misconfigured(Exception):
    """A container refers to what is not there; the words of CreateContainerConfigError."""


class Unbound(Misconfigured):
    """A claim is not there, and is waited for."""


def data_of(obj: Object) -> dict[str, bytes]:
    """A ConfigMap's or Secret's data."""
    if obj.get("kind") == "Secret" or "type" in obj:
        return {key: base64.b64decode(value) for key, value in (obj.get("data") or {}).items()}
    found = {key: value.encode() for key, value in (obj.get("data") or {}).items()}
    return found | {key: base64.b64decode(value) for key, value in (obj.get("binaryData") or {}).items()}


class Sandbox:
    """One pod's folder.

    Args:
        root: where pods' folders are.
        pod: the pod.
        address: its IP.
        look: finds Secrets, ConfigMaps, Services and claims.
        extra: variables of every container.
        mark: in the environment of all that the pod starts.
    """

    def __init__(self, root: Path, pod: Object, address: str, look: Look, extra: Mapping[str, str], mark: str) -> None:
        self._pod = pod
        self._address = address
        self._look = look
        self._extra = extra
        self._mark = mark
        self.credentials: Path | None = None
        self._tmp = ""
        self._claims = root / "claims"
        self.folder: Path = root / str(pod["metadata"]["uid"])
        self.where = pod["metadata"]["namespace"]

    def prepare(self) -> None:
        """Make the folders of volumes, and fill those of secrets, config maps and downward fields.

        Raises:
            Misconfigured: a volume's source is not there.
            Unbound: of these, a claim.
        """
        for volume in self._pod["spec"].get("volumes") or []:
            folder = self.folder / "volumes" / volume["name"]
            if "persistentVolumeClaim" in volume:
                self._claim(folder, volume["persistentVolumeClaim"]["claimName"])
                continue
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in self._content(volume).items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(0o600)

    def allow(self, kubeconfig: Object) -> None:
        """Let containers find a kubeconfig: files of a service account have a fixed path, and nothing can be mounted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps(kubeconfig))
        path.chmod(0o600)
        self.credentials = path

    def _claim(self, folder: Path, name: str) -> None:
        """A claim's volume is one folder for all pods of its namespace, and outlives them, but not the claim."""
        claim = self._look("PersistentVolumeClaim", self.where, name)
        if claim is None:
            raise Unbound(f'persistentvolumeclaim "{name}" not found')
        kept = self._claims / self.where / f"{name}-{claim['metadata']['uid']}"
        kept.mkdir(parents=True, exist_ok=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            folder.symlink_to(kept)
        for one in self._pod["spec"]["containers"]:
            for mount in one.get("volumeMounts") or []:
                if mount["name"] == folder.name:
                    (kept / mount.get("subPath", "")).mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def ended(self) -> None:
        """The containers are over: what they left in their temporary folder goes."""
        if self._tmp:
            shutil.rmtree(self._tmp, ignore_errors=True)

    def log(self, container: str) -> Path:
        """Where a container's output goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{container}.log"

    def home(self, container: Object) -> Path:
        """Where a container's command runs: its working directory if that is there, else the pod's folder."""
        wanted = container.get("workingDir")
        return Path(wanted) if wanted and Path(wanted).is_dir() else self.folder

    def message(self, container: str) -> Path:
        """Where a container may leave its last words."""
        return self.folder / f"{container}.termination-log"

    def _content(self, volume: Object) -> dict[str, bytes]:
        if "secret" in volume:
            source = volume["secret"]
            return self._items("Secret", source["secretName"], source)
        if "configMap" in volume:
            return self._items("ConfigMap", volume["configMap"]["name"], volume["configMap"])
        if "downwardAPI" in volume:
            return self._downward(volume["downwardAPI"])
        if "projected" not in volume:
            return {}
        found: dict[str, bytes] = {}
        for source in volume["projected"].get("sources") or []:
            if "secret" in source:
                found |= self._items("Secret", source["secret"]["name"], source["secret"])
            elif "configMap" in source and source["configMap"]["name"] != "kube-root-ca.crt":
                found |= self._items("ConfigMap", source["configMap"]["name"], source["configMap"])
            elif "downwardAPI" in source:
                found |= self._downward(source["downwardAPI"])
        return found

    def _items(self, kind: str, name: str, source: Object) -> dict[str, bytes]:
        obj = self._look(kind, self.where, name)
        if obj is None:
            if source.get("optional"):
                return {}
            raise Misconfigured(f'{kind.lower()} "{name}" not found')
        data = data_of(obj)
        if not source.get("items"):
            return data
        return {one["path"]: data[one["key"]] for one in source["items"] if one["key"] in data}

    def _downward(self, source: Object) -> dict[str, bytes]:
        return {
            one["path"]: self.field(one["fieldRef"]["fieldPath"]).encode()
            for one in source.get("items") or []
            if "fieldRef" in one
        }

    def field(self, path: str) -> str:
        """A downward field."""
        known = {
            "status.podIP": self._address,
            "status.podIPs": self._address,
            "status.hostIP": "127.0.0.1",
            "status.hostIPs": "127.0.0.1",
        }
        if path in known:
            return known[path]
        match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
        if match:
            return str((self._pod["metadata"].get(match[1]) or {}).get(match[2], ""))
        value: Any = self._pod
        for step in path.split("."):
            value = (value or {}).get(step)
        if isinstance(value, dict):
            return "\n".join(f'{key}="{one}"' for key, one in value.items())
        return "" if value is None else str(value)

    def environment(self, container: Object) -> dict[str, str]:
        """A container's variables.

        Raises:
            Misconfigured: a source that is not optional is not there.
        """
        found = {key: os.environ[key] for key in INHERITED if key in os.environ}
        found.update(self._extra)
        # What a container that is killed leaves in its /tmp goes with it. A short path: sockets lie there.
        self._tmp = self._tmp or tempfile.mkdtemp(prefix="pod-")
        found.update({MARK: self._mark, "HOSTNAME": self._pod["metadata"]["name"], "TMPDIR": self._tmp})
        if self.credentials is not None:
            found["KUBECONFIG"] = str(self.credentials)
        for source in container.get("envFrom") or []:
            for kind, ref in (("ConfigMap", source.get("configMapRef")), ("Secret", source.get("secretRef"))):
                if ref:
                    content = self._items(kind, ref["name"], {"optional": ref.get("optional")})
                    prefix = source.get("prefix", "")
                    found.update({prefix + key: value.decode() for key, value in content.items()})
        for env in container.get("env") or []:
            value = self._value(env, container)
            if value is not None:
                found[env["name"]] = self.placed(_expanded(value, found), container)
        return found

    def _value(self, env: Object, container: Object) -> str | None:
        source = env.get("valueFrom")
        if source is None:
            return str(env.get("value") or "")
        if "fieldRef" in source:
            return self.field(source["fieldRef"]["fieldPath"])
        if "resourceFieldRef" in source:
            side, _, what = source["resourceFieldRef"]["resource"].partition(".")
            return str(((container.get("resources") or {}).get(side) or {}).get(what, "0"))
        for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
            ref = source.get(key)
            if ref is not None:
                content = self._items(kind, ref["name"], {"optional": ref.get("optional")})
                if ref["key"] in content:
                    return content[ref["key"]].decode()
                if not ref.get("optional"):
                    raise Misconfigured(f"couldn't find key {ref['key']} in {kind} {self.where}/{ref['name']}")
        return None

    def command(self, container: Object, environment: Mapping[str, str]) -> list[str]:
        """What is run; variables as `$(NAME)` are expanded."""
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        return [self.placed(_expanded(str(one), environment), container) for one in words]

    def placed(self, text: str, container: Object) -> str:
        """A text with folders in place of mount paths, and addresses in place of services' names."""
        for mount in container.get("volumeMounts") or []:
            path = mount["mountPath"].rstrip("/")
            if path and path != "/dev/shm":  # noqa: S108  the host's own serves
                folder = self.folder / "volumes" / mount["name"] / mount.get("subPath", "")
                text = re.sub(rf"(?<![\w/.-]){re.escape(path)}(?![\w.-])", str(folder).rstrip("/"), text)
        last = container.get("terminationMessagePath")
        if last:
            text = text.replace(last, str(self.message(container["name"])))
        return re.sub(r"\b([a-z0-9-]+)\.([a-z0-9-]+)\.svc(\.cluster\.local)?\b", self._service, text)

    def _service(self, match: re.Match[str]) -> str:
        service = self._look("Service", match[2], match[1])
        address = ((service or {}).get("spec") or {}).get("clusterIP")
        return address if address and address != "None" else match[0]


def _expanded(text: str, names: Mapping[str, str]) -> str:
    def put(match: re.Match[str]) -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        return names.get(match[1], match[0])

    return re.sub(r"\$?\$\(([A-Za-z_][A-Za-z0-9_]*)\)", put, text)
