//go:build !race

package provisioning

// exRace: the race detector is on. The search runs on one goroutine, and the
// detector makes it ten times as long.
const exRace = false
