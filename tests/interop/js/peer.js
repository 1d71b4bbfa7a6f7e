// A js-libp2p peer for one job, told on the command line:
//   serve RELAY             hold a place at the relay and serve experts of layers 3 and 4; prints its circuit address
//   call ADDRESS SIZES      send frames of these sizes to an echo and check what comes back

import './polyfill.js'
import { tcp } from '@libp2p/tcp'
import { webSockets } from '@libp2p/websockets'
import { callEcho, circuitAddress, createPeer, serveExperts } from './host.js'

const [job, address, sizes] = process.argv.slice(2)
const transports = [tcp(), webSockets()]

if (job === 'serve') {
  const peer = await createPeer({ transports, listen: [`${address}/p2p-circuit`] })
  await serveExperts(peer, [[3, 0, 8], [4, 0, 8]], error => console.log(`served ${error ?? 'to the end'}`))
  console.log(`listening ${await circuitAddress(peer)}`)
  console.log('ready')
  process.stdin.resume()
  process.stdin.on('end', () => process.exit(0))
} else {
  const peer = await createPeer({ transports })
  try {
    console.log(`echoed ${await callEcho(peer, address, sizes.split(',').map(Number))}`)
  } catch (error) {
    console.log(`failed ${error.message}`)
  }
  process.exit(0)
}
