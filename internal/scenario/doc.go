// Package scenario runs scenario files: small texts that drive the real driver
// and the real executor over the fake backend in virtual time, and state what
// must hold. The language is described in testdata/scenarios/README.md.
package scenario
