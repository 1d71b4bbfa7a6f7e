// The same peer in a web page: over WebSocket, it calls an echo and serves experts, both through the relay.
// It tells the server that it came from what it does.

import { webSockets } from '@libp2p/websockets'
import { callEcho, circuitAddress, createPeer, serveExperts } from './host.js'

function say (text) {
  return fetch('/said', { method: 'POST', body: text })
}

const wanted = new URLSearchParams(location.search)
try {
  const peer = await createPeer({ transports: [webSockets()], listen: [`${wanted.get('relay')}/p2p-circuit`] })
  await serveExperts(peer, [[3, 0, 8], [4, 0, 8]], error => { void say(`served ${error ?? 'to the end'}`) })
  const address = await circuitAddress(peer)
  const sizes = wanted.get('sizes').split(',').map(Number)
  await say(`echoed ${await callEcho(peer, wanted.get('target'), sizes)}`)
  await say(`listening ${address}`)
} catch (error) {
  await say(`failed ${error.stack ?? error}`)
}
