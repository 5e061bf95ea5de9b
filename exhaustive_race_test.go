//go:build race

package provisioning

const exRace = true
