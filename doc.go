// Package provisioning drives a declared cluster shape toward convergence.
package provisioning
