module github.com/swactor/provisioning/internal/histories

go 1.26.0

replace github.com/swactor/provisioning => ../..

require (
	github.com/anishathalye/porcupine v1.3.1
	github.com/stretchr/testify v1.12.1
	github.com/swactor/provisioning v0.0.0
)

require go.yaml.in/yaml/v3 v3.0.5 // indirect
