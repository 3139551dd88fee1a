"""The two programs that Flower starts, from the code on this machine."""

import federation.node
import federation.server

server = federation.server.app
node = federation.node.app
