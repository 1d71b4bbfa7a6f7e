// A js-libp2p relay, with the limits raised that would cut tensors off. Prints its addresses; ends with its input.

import './polyfill.js'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { circuitRelayServer } from '@libp2p/circuit-relay-v2'
import { identify } from '@libp2p/identify'
import { tcp } from '@libp2p/tcp'
import { webSockets } from '@libp2p/websockets'
import { createLibp2p } from 'libp2p'

const relay = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0', '/ip4/127.0.0.1/tcp/0/ws'] },
  transports: [tcp(), webSockets()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: {
    identify: identify(),
    relay: circuitRelayServer({ reservations: { maxReservations: 100, applyDefaultLimit: false } })
  }
})
for (const address of relay.getMultiaddrs()) console.log(`listening ${address}`)
console.log('ready')
process.stdin.resume()
process.stdin.on('end', () => process.exit(0))
