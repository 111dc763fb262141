{{/* Outrider's own configuration, as YAML. Each part is a dictionary; `config` of the values goes over all. */}}

{{/* Whether the draft has pods of its own. */}}
{{- define "outrider.hasDraftPods" -}}
{{- if and (eq .Values.draft.method "draft") (not .Values.draft.colocate) -}}true{{- end -}}
{{- end }}

{{- define "outrider.bundledTarget" -}}smollm2-135m-instruct{{- end }}

{{/* Checks that the schema cannot express. */}}
{{- define "outrider.checkModels" -}}
{{- $draft := .Values.draft -}}
{{- if dig "server" "api_key" "" .Values.config -}}
{{- fail "config.server.api_key would be in a ConfigMap, for more to read than a Secret; put the key into a Secret under api-key and name it in auth.existingSecret." -}}
{{- end -}}
{{- if and (eq $draft.method "draft") (not $draft.model) (ne .Values.model (include "outrider.bundledTarget" .)) -}}
{{- fail (printf "draft.model is not set, and there is no bundled draft for the model %q; set it, or draft.method to ngram or off." .Values.model) -}}
{{- end -}}
{{- if $draft.colocate -}}
{{- if or (ne (int .Values.target.tensorParallel) 1) (ne (int $draft.tensorParallel) 1) -}}
{{- fail "draft.colocate is true, which takes target.tensorParallel 1 and draft.tensorParallel 1; set both to 1, or draft.colocate to false." -}}
{{- end -}}
{{- end -}}
{{- range $role := list "target" "draft" -}}
{{- $group := index $.Values $role -}}
{{- if mod (int $group.tensorParallel) (int $group.nodes) -}}
{{- fail (printf "%s.tensorParallel is %d, which cannot be divided evenly over %s.nodes (%d); change one of them." $role (int $group.tensorParallel) $role (int $group.nodes)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Settings of all processes of a model. */}}
{{- define "outrider.config.models" -}}
{{- include "outrider.checkModels" . -}}
{{- $target := dict "model" .Values.model "device" .Values.target.device "dtype" .Values.target.dtype "tensor_parallel" (int .Values.target.tensorParallel) -}}
{{- with .Values.revision }}{{ $_ := set $target "revision" . }}{{ end -}}
{{- with .Values.tokenizer }}{{ $_ := set $target "tokenizer" . }}{{ end -}}
{{- with .Values.target.quantization }}{{ $_ := set $target "quantization" . }}{{ end -}}
{{- with .Values.target.maxModelLen }}{{ $_ := set $target "max_model_len" (int .) }}{{ end -}}
{{- $draft := dict -}}
{{- $speculation := dict "policy" .Values.draft.policy -}}
{{- if eq .Values.draft.method "draft" -}}
{{- $draft = dict "device" (default "auto" .Values.draft.device) "dtype" .Values.draft.dtype "tensor_parallel" (int .Values.draft.tensorParallel) -}}
{{- with .Values.draft.model }}{{ $_ := set $draft "model" . }}{{ end -}}
{{- with .Values.draft.revision }}{{ $_ := set $draft "revision" . }}{{ end -}}
{{- with .Values.draft.quantization }}{{ $_ := set $draft "quantization" . }}{{ end -}}
{{- $_ := set $speculation "method" "draft" -}}
{{- else -}}
{{- $_ := set $draft "model" nil -}}
{{- if eq .Values.draft.method "ngram" }}{{ $_ := set $speculation "method" "ngram" }}{{ end -}}
{{- end -}}
{{- with .Values.draft.numSpeculativeTokens }}{{ $_ := set $speculation "num_speculative_tokens" (int .) }}{{ end -}}
{{- dict "target" $target "draft" $draft "speculation" $speculation "log_format" "json" | toYaml -}}
{{- end }}

{{/* Placement of the models, and its timeouts. */}}
{{- define "outrider.config.cluster" -}}
{{- $cluster := dict "placement_timeout_s" (int .Values.engine.placementTimeoutSeconds) "start_timeout_s" (int .Values.engine.startTimeoutSeconds) -}}
{{- if eq .Values.draft.method "draft" }}{{ $_ := set $cluster "colocate" .Values.draft.colocate }}{{ end -}}
{{- toYaml (dict "cluster" $cluster) -}}
{{- end }}

{{/* The listeners, of a gateway or of the server of mode `plain`. */}}
{{- define "outrider.config.front" -}}
{{- $server := dict "host" "0.0.0.0" "port" 8000 "grpc_port" 50051 "admin_port" 8081 "drain_s" (int .Values.gateway.drainSeconds) "max_connection_age_s" (int .Values.gateway.maxConnectionAgeSeconds) "max_connection_grace_s" (int .Values.gateway.maxConnectionGraceSeconds) -}}
{{- /* Behind a proxy all clients have its address. */ -}}
{{- if or .Values.ingress.enabled .Values.gatewayApi.enabled }}{{ $_ := set $server "max_connections_per_address" 0 }}{{ end -}}
{{- with .Values.servedNames }}{{ $_ := set $server "model_names" . }}{{ end -}}
{{- if .Values.auth.anonymous }}{{ $_ := set $server "allow_anonymous" true }}{{ end -}}
{{- if .Values.auth.keysSecret }}{{ $_ := set $server "api_keys_file" "/etc/outrider-keys/keys.yaml" }}{{ end -}}
{{- if .Values.tls.enabled -}}
{{- $_ := set $server "tls_cert" "/etc/outrider-tls/tls.crt" -}}
{{- $_ := set $server "tls_key" "/etc/outrider-tls/tls.key" -}}
{{- if .Values.tls.clientCASecret }}{{ $_ := set $server "tls_client_ca" "/etc/outrider-client-ca/ca.crt" }}{{ end -}}
{{- end -}}
{{- toYaml (dict "server" $server) -}}
{{- end }}

{{/* A controller of one RayCluster, without ports for clients. */}}
{{- define "outrider.config.controller" -}}
{{- $labels := dict "target_labels" (list "outrider-role=target") -}}
{{- if include "outrider.hasDraftPods" . }}{{ $_ := set $labels "draft_labels" (list "outrider-role=draft") }}{{ end -}}
{{- $own := dict
  "cluster" (merge (dict "address" "auto" "ray_timeout_s" (int .Values.engine.placementTimeoutSeconds) "replicas" 1 "first_replica" (int .index) "listen" "0.0.0.0:50060") $labels)
  "server" (dict "host" "0.0.0.0" "admin_port" 8081 "processes" 0 "drain_s" (int .Values.engine.drainSeconds)) -}}
{{- $models := include "outrider.config.models" . | fromYaml -}}
{{- $cluster := include "outrider.config.cluster" . | fromYaml -}}
{{- mergeOverwrite $models $cluster $own (deepCopy .Values.config) | toYaml -}}
{{- end }}

{{- define "outrider.config.gateway" -}}
{{- $controllers := list (printf "%s.%s.svc:50060" (include "outrider.controllersService" .) .Release.Namespace) -}}
{{- $models := include "outrider.config.models" . | fromYaml -}}
{{- $front := include "outrider.config.front" . | fromYaml -}}
{{- mergeOverwrite $models $front (dict "server" (dict "controllers" $controllers)) (deepCopy .Values.config) | toYaml -}}
{{- end }}

{{/* Everything in one pod. */}}
{{- define "outrider.config.plain" -}}
{{- $models := include "outrider.config.models" . | fromYaml -}}
{{- $front := include "outrider.config.front" . | fromYaml -}}
{{- $cluster := include "outrider.config.cluster" . | fromYaml -}}
{{- mergeOverwrite $models $front $cluster (dict "cluster" (dict "replicas" (int (max 1 .Values.replicas)))) (deepCopy .Values.config) | toYaml -}}
{{- end }}
