"""The two programs that Flower starts, from the code on this machine."""

import workbench.federation.node
import workbench.federation.server

server = workbench.federation.server.app
node = workbench.federation.node.app
