module github.com/swactor/provisioning/examples/sshfleet

go 1.26.0

replace github.com/swactor/provisioning => ../..

replace github.com/swactor/provisioning/examples/localfleet => ../localfleet

require (
	github.com/stretchr/testify v1.12.1
	github.com/swactor/provisioning v0.0.0
	github.com/swactor/provisioning/examples/localfleet v0.0.0
	golang.org/x/crypto v0.59.0
)

require (
	go.yaml.in/yaml/v3 v3.0.6 // indirect
	golang.org/x/sys v0.50.0 // indirect
	golang.org/x/term v0.48.0 // indirect
)
