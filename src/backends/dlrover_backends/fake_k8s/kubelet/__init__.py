"""A kubelet whose containers are processes, and the scheduler and controllers that a cluster needs beside it.

All speak to the API server alone, so they run against a real control plane as well as against the fake one.
"""

from dlrover_backends.fake_k8s.kubelet.client import Client, from_kubeconfig
from dlrover_backends.fake_k8s.kubelet.controllers import JobController, NodeController
from dlrover_backends.fake_k8s.kubelet.node import Kubelet
from dlrover_backends.fake_k8s.kubelet.proxy import Proxy
from dlrover_backends.fake_k8s.kubelet.scheduler import Scheduler

__all__ = ["Client", "JobController", "Kubelet", "NodeController", "Proxy", "Scheduler", "from_kubeconfig"]
