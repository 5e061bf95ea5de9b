module github.com/swactor/provisioning/examples/localfleet

go 1.26.0

replace github.com/swactor/provisioning => ../..

require (
	github.com/swactor/provisioning v0.0.0
	golang.org/x/crypto v0.59.0
	golang.org/x/sys v0.50.0
)

require (
	github.com/stretchr/testify v1.12.1
	pgregory.net/rapid v1.3.0
)

require go.yaml.in/yaml/v3 v3.0.5 // indirect
