// A js-libp2p peer that speaks what Kvasir's peers speak.

import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { identify } from '@libp2p/identify'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { PROTOCOL, serve } from './experts.js'
import { Link } from './link.js'

export async function createPeer ({ transports, listen = [], services = {} }) {
  return await createLibp2p({
    addresses: { listen },
    transports: [...transports, circuitRelayTransport()],
    connectionEncrypters: [noise()],
    streamMuxers: [yamux()],
    // Browsers refuse private addresses by default; the tests stay on loopback.
    connectionGater: { denyDialMultiaddr: () => false },
    services: { identify: identify(), ...services }
  })
}

// Serve experts through the relay that the peer listens on; `onLink` is told when a dispatcher has come and gone.
export async function serveExperts (peer, ranges, onLink) {
  await peer.handle(PROTOCOL, ({ stream }) => {
    const link = new Link(stream, { opener: false })
    serve(link, ranges).then(() => onLink(null), onLink)
  }, { runOnLimitedConnection: true })
}

// The peer's circuit address, once its relay has given it a place.
export async function circuitAddress (peer) {
  for (;;) {
    const address = peer.getMultiaddrs().map(String).find(text => text.includes('/p2p-circuit'))
    if (address != null) return address
    await new Promise(resolve => peer.addEventListener('self:peer:update', resolve, { once: true }))
  }
}

function pattern (size, seed) {
  const bytes = new Uint8Array(size)
  let state = (seed * 2654435761 + 1) >>> 0
  for (let i = 0; i < size; i++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    bytes[i] = state >>> 24
  }
  return bytes
}

function same (a, b) {
  return a.length === b.length && a.every((byte, index) => byte === b[index])
}

// Send frames of these sizes with every priority to an echo, and check that each comes back; the number of frames.
export async function callEcho (peer, address, sizes) {
  const stream = await peer.dialProtocol(multiaddr(address), PROTOCOL, { runOnLimitedConnection: true })
  const link = new Link(stream, { opener: true })
  const waiting = []
  for (const size of sizes) {
    for (let priority = 0; priority < 4; priority++) {
      const frame = pattern(size, size + priority)
      link.send(frame, priority)
      waiting.push(frame)
    }
  }
  const count = waiting.length
  while (waiting.length > 0) {
    const frame = await link.receive()
    if (frame == null) throw new Error(`the link ended, ${waiting.length} frames did not come back`)
    const index = waiting.findIndex(sent => same(sent, frame))
    if (index < 0) throw new Error(`a frame of ${frame.length} bytes came back that was not sent`)
    waiting.splice(index, 1)
  }
  await link.close()
  return count
}
