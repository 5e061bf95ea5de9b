module github.com/swactor/provisioning/examples/localfleet

go 1.26.0

replace github.com/swactor/provisioning => ../..

require (
	github.com/swactor/provisioning v0.0.0
	golang.org/x/crypto v0.59.0
	golang.org/x/sys v0.50.0
)
