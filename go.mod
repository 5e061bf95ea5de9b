module github.com/swactor/provisioning

go 1.26.0
