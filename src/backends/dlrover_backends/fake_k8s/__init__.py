"""A Kubernetes API server for tests: real sockets, a real API's rules and refusals, no cluster; and a kubelet of processes.

`FakeCluster` starts the server in a thread. Its `faults` play what goes wrong on real clusters. The rules are held to
recordings of a kube-apiserver 1.36 by `tests/integration/test_fake_k8s_recordings.py`.
"""

from dlrover_backends.fake_k8s.cluster import FakeCluster, kubeconfig
from dlrover_backends.fake_k8s.faults import Fault, Faults, What
from dlrover_backends.fake_k8s.ground import Ground
from dlrover_backends.fake_k8s.rights import User, account
from dlrover_backends.fake_k8s.server import FakeServer

__all__ = ["FakeCluster", "FakeServer", "Fault", "Faults", "Ground", "User", "What", "account", "kubeconfig"]
